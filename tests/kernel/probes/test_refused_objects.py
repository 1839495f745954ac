# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Objects that the kernel refuses: the true cause in one line, and nothing of it on the output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent.core.errors import ProbeError
from agent.node import preflight
from agent.probes.libbpf import BpfObject
from tools.harness.node import Node

ROOT = Path(__file__).parents[3]
UNPRIVILEGED = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
SOURCE = """\
#define SECTION(name) __attribute__((section(name), used))
SECTION("license") char terms[] = "GPL";
SECTION("uprobe") int reads_too_far(void *context) { return *(int *)((char *)context + 4096); }
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An object whose program reads beyond its context."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "refused.bpf.c").write_text(SOURCE)
    path = folder / "refused.bpf.o"
    command = ["clang", "-O2", "-g", "-target", "bpf", "-c", str(folder / "refused.bpf.c"), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def command(
    node: Node, *arguments: str, prefix: tuple[str, ...] = (), bpf_object: Path | None = None
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one of the product's commands on the node."""
    environment = {**os.environ, **node.environment}
    if bpf_object is not None:
        environment["GPUWARDEN_BPF_OBJECT"] = str(bpf_object)
    line = [*prefix, sys.executable, *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def probes_line(stdout: str) -> str:
    """The one line of the check of probes."""
    [line] = [line for line in stdout.splitlines() if line.startswith(("ok    probes", "FAIL  probes"))]
    return line


def checks(stdout: str) -> list[str]:
    """The lines that are neither a check's first line nor indented below one."""
    return [line for line in stdout.splitlines() if not line.startswith(("ok    ", "FAIL  ", "      "))]


def test_the_error_has_the_verifiers_reason_and_nothing_is_printed(
    refused: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProbeError) as error, BpfObject(refused):
        pass
    assert "program reads_too_far: " in str(error.value)
    assert "off=4096" in str(error.value)
    assert "\n" not in str(error.value)
    assert "5.15" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_a_failed_load_after_another_object_leaves_its_messages_working(refused: Path) -> None:
    with BpfObject(preflight.bpf_object().with_name("stacks.bpf.o")) as loaded:
        for _ in range(3):
            with pytest.raises(ProbeError, match="reads_too_far"), BpfObject(refused):
                pass
        with pytest.raises(ProbeError, match="cannot attach"):  # libbpf prints here
            loaded.attach_uprobe("stacks_launch", "/nowhere", 1, 1, at_return=False)


SIGNALS = 100  # a tenth of a second of them; libbpf itself bears four for each program


def test_signals_while_the_kernel_verifies_the_programs_do_not_refuse_them() -> None:
    """The verifier gives up with EAGAIN then: so does a tracer's attaching, or a freezer."""
    loading, came = threading.get_ident(), []

    def interrupt() -> None:
        for _ in range(SIGNALS):
            time.sleep(0.001)
            signal.pthread_kill(loading, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with BpfObject(preflight.bpf_object()):
            thread.join()
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    assert came


def test_doctor_prints_the_cause_in_its_line_and_nothing_else(node: Node, refused: Path) -> None:
    status, out, errors = command(node, "-m", "gpuwarden", "doctor", bpf_object=refused)
    assert (status, errors, checks(out)) == (3, "", [])
    assert "program reads_too_far: " in probes_line(out)
    assert "BTF" not in probes_line(out)


def test_the_whole_log_is_there_when_it_is_asked_for(node: Node, refused: Path) -> None:
    _, out, errors = command(node, "-m", "gpuwarden", "--verbose", "doctor", bpf_object=refused)
    assert "BEGIN PROG LOAD LOG" in errors
    assert "BEGIN PROG LOAD LOG" not in out


def test_doctor_prints_nothing_but_its_lines_where_everything_works(node: Node) -> None:
    status, out, errors = command(node, "-m", "gpuwarden", "doctor")
    assert (status, errors, checks(out)) == (0, "", [])


def test_doctor_without_capabilities_names_them_as_the_cause(node: Node) -> None:
    status, out, errors = command(node, "-m", "gpuwarden", "doctor", prefix=tuple(UNPRIVILEGED))
    assert (status, errors, checks(out)) == (3, "", [])
    assert "CAP_BPF and CAP_PERFMON are missing" in probes_line(out) or "CAP_SYS_ADMIN is missing" in probes_line(out)
    assert "\nok    kernel: " in f"\n{out}"


def test_gputop_once_prints_one_tick_and_nothing_else(node: Node, tmp_path: Path) -> None:
    program = "import sys; from gpuwarden.main import gputop; gputop(sys.argv[1:])"
    socket = ("--socket", str(tmp_path / "none.sock"))
    status, out, errors = command(node, "-c", program, "--once", "--no-color", *socket)
    assert (status, errors) == (0, "")
    assert "Simulated" in out


def test_gputop_once_reports_a_refusal_in_one_line(node: Node, refused: Path, tmp_path: Path) -> None:
    program = "import sys; from gpuwarden.main import gputop; gputop(sys.argv[1:])"
    socket = ("--socket", str(tmp_path / "none.sock"))
    status, out, errors = command(node, "-c", program, "--once", *socket, bpf_object=refused)
    assert (status, out, errors.count("\n")) == (4, "", 1)
    assert "program reads_too_far: " in errors
