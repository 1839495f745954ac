# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The quick start, as it is written: from `git clone` to two containers on the screen, and to a first policy.

The demo that a newcomer sees is a whole one, so here is also what it writes, and that nothing of it is left behind.

`packaging/fresh-machine.sh DIR make demo` does the same where nothing is installed yet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.node import ROOT
from tests.e2e.packaging.demo import SECONDS, left_behind
from tools.harness.wait import until

PAGE = (ROOT / "docs/quick-start.md").read_text()
DEADLINE_SECONDS = 900.0  # a virtual environment is made and everything is compiled


def commands_below(heading: str) -> list[str]:
    """Those of the first block of shell below a heading that begins so, a line each, without comments."""
    found = re.search(rf"^## {heading}.*?^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found, heading
    return [line.partition("#")[0].strip() for line in found[1].splitlines()]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="e2e-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        yield folder


@contextmanager
def typed(commands: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The shell of a newcomer, who types them one after another. What it shows is in the file `screen`."""
    ours = ("VIRTUAL_ENV", "GPUWARDEN_SIM_BUILD", "MAKE", "MFLAGS")  # make's, for it hands its variables down
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    options = {"ARGS": f"--seconds {SECONDS} --json {folder}/figures.json", "TMPDIR": f"{folder}/tmp"}
    command = ["bash", "-e", "-c", "\n".join(commands)]
    with (folder / "screen").open("wb") as screen:
        shell = subprocess.Popen(
            command, cwd=folder, env={**environment, **options}, stdout=screen, stderr=screen, process_group=0
        )
    try:
        yield shell
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGINT)
            shell.wait(timeout=DEADLINE_SECONDS)


def demo_of(shell: int) -> int | None:
    """The process that the shell's `make demo` started."""
    with suppress(psutil.NoSuchProcess):  # it ended meanwhile
        for process in psutil.Process(shell).children(recursive=True):
            _, program, word, *_ = [*process.cmdline(), "", "", ""]
            if program.endswith("/gpuwarden") and word == "demo":
                return process.pid
    return None


def screen_of(shell: subprocess.Popen[bytes], folder: Path) -> str:
    """What it shows. All commands have to succeed."""
    status, screen = shell.wait(timeout=DEADLINE_SECONDS), (folder / "screen").read_text()
    assert status == 0, screen[-6000:]
    return screen


def check(figures: dict[str, Any]) -> None:
    """Those of a whole demo."""
    assert figures["gpu"] == "simulated"
    assert set(figures["online_p99_ms"]) == {"alone", "uncontrolled", "controlled"}
    assert all(value > 0 for value in figures["online_p99_ms"].values())
    assert set(figures["offline_throughput_ratio"]) == {"uncontrolled", "controlled"}
    assert all(value > 0 for value in figures["offline_throughput_ratio"].values())
    assert 0 < figures["left_over_ratio"] < 1
    assert 0 <= figures["attribution_error_ratio"] < 1
    assert figures["launches_missed"] == 0
    assert figures["pauses"] > 0


def test_two_commands_show_two_containers_and_leave_nothing_behind_and_three_more_make_a_policy_that_check_accepts(
    folder: Path,
) -> None:
    see, write = commands_below("Two commands"), commands_below("Three commands")
    assert (len(see), len(write)) == (2, 3)
    with typed([line.replace(" URL ", f" {ROOT} ") for line in see], folder) as shell:
        until(
            lambda: demo_of(shell.pid) or shell.poll() is not None,
            "the demo to start",
            DEADLINE_SECONDS,
            step_seconds=0.5,
        )
        demo = demo_of(shell.pid)
        screen = screen_of(shell, folder)
        assert demo is not None, screen
    assert left_behind(folder, demo) == []
    below = screen[screen.index("\nCONTAINER ") :]
    assert re.search(r"^chat +(runc +)?online ", below, re.MULTILINE)
    assert re.search(r"^training +(runc +)?offline ", below, re.MULTILINE)
    assert "online p99" in screen
    check(json.loads((folder / "figures.json").read_text()))
    with typed(write, folder) as shell:
        assert "policy.yaml: ok: " in screen_of(shell, folder)
