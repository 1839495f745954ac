# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How a daemon of a run's own is asked, and what is reported of the product's channel to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.core.model import ProcessId
from conformance.checks.mps import plain
from conformance.checks.mps.language import answered, confined
from conformance.checks.mps.servers import form_row, string_kind
from conformance.host import Host
from conformance.report.model import Verdict
from enforce.actuators.mps.model import Daemon, MpsError, MpsTimeoutError
from enforce.actuators.mps.protocol3 import connect_over

ANSWERS = """\
import os, sys
assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"
answers = {"get_server_list": 4711, "get_server_status 4711": "ACTIVE", "get_active_thread_percentage 4711": "100.0"}
for line in sys.stdin:
    command = line.strip()
    print(answers.get(command, f'Unknown command "{command}"'))
"""


def channel(folder: Path, script: str) -> plain.Plain:
    """To a daemon whose program does this."""
    program = folder / "control"
    program.write_text(f"#!{sys.executable}\n{script}")
    program.chmod(0o755)
    host = Host(True, True, folder, None, None, folder, folder, "not here", sys.executable, {})
    daemon = Daemon(ProcessId(1, 1), "/pipes", str(program))
    return plain.Plain(daemon, host=host, extra={"CUDA_MPS_PIPE_DIRECTORY": "/pipes"})


def test_the_product_reads_what_the_daemons_own_program_prints(tmp_path: Path) -> None:
    control = connect_over(channel(tmp_path, ANSWERS))
    assert [(server.tgid, server.status) for server in control.servers()] == [(4711, "ACTIVE")]


def test_a_refusal_is_none_of_the_answers_though_the_exit_code_is_0(tmp_path: Path) -> None:
    answer = channel(tmp_path, ANSWERS).ask(given="get_something\n")
    assert (answer.succeeded, answer.text) == (True, 'Unknown command "get_something"\n')
    assert connect_over(channel(tmp_path, ANSWERS)).devices() == {}


@pytest.mark.parametrize(
    ("command", "text", "verdict"),
    [
        ("get_client_list S", "12\n", Verdict.OK),
        ("get_client_list S", "Server 7 not found\n", Verdict.DIFFERS),
        ("get_default_client_priority", "Insufficient privileges for UID 1.\n", Verdict.DIFFERS),
        ("device_query", 'Unknown command "device_query"\n', Verdict.MEASURED),
    ],
)
def test_an_error_is_known_by_its_text(tmp_path: Path, command: str, text: str, verdict: Verdict) -> None:
    row = answered(command, channel(tmp_path, f"print({text!r}, end='')").ask(given="x\n"))
    assert (row.verdict, row.figure) == (verdict, verdict is Verdict.OK)


def test_a_daemon_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(MpsTimeoutError):
        channel(tmp_path, "import time; time.sleep(600)").ask(given="get_server_list\n")


def refusing(words: str) -> Callable[[], object]:
    def ask() -> object:
        raise MpsError(words)

    return ask


@pytest.mark.parametrize(
    ("ask", "verdict"),
    [
        (lambda: (), Verdict.OK),
        (refusing("MPS is left alone: this kernel has no Landlock"), Verdict.SKIPPED),
        (refusing("Cannot find MPS control daemon process"), Verdict.DIFFERS),
    ],
)
def test_a_kernel_without_landlock_is_distinguished_from_a_channel_that_does_not_work(
    ask: Callable[[], object], verdict: Verdict
) -> None:
    assert confined(ask).verdict is verdict


@pytest.mark.parametrize(
    ("lines", "verdict", "kind"),
    [
        (["[0] 01:00.0, NVIDIA H100 80GB", "17.3"], Verdict.OK, "a name"),
        (["[0] 00000000:01:00.0, GPU-5e1f0000-51a1-4000-8000-000000000001", "17.3"], Verdict.OK, "a UUID"),
        (["[0] 01:00.0, NVIDIA H100 80GB", "18.3"], Verdict.DIFFERS, "a name"),  # of another process
        (["GPU-5e1f0000-51a1-4000-8000-000000000001 17"], Verdict.DIFFERS, "nothing"),
        (["Server not found"], Verdict.DIFFERS, "nothing"),
    ],
)
def test_a_list_of_clients_is_held_against_the_form_that_the_product_reads(
    lines: list[str], verdict: Verdict, kind: str
) -> None:
    assert form_row(lines, 17).verdict is verdict
    assert string_kind(lines) == kind
