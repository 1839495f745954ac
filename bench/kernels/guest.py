# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What runs on a machine: its checks, or where the kernel is too old, what the agent says then. A line for each.

A line is `MARK` and a JSON object, so that it is found between those of the kernel on the same console.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from agent.node.preflight import OLDEST_KERNEL, kernel_version
from bench.kernels.features import MARK, REFUSAL, arguments

_LONGEST_SECONDS: Final = 120.0
_WORST: Final = {"failed": 3, "skipped": 2, "passed": 1}


class Reporter:
    """Writes a record of each test when it is over: the worst of its phases, and what it recorded of the kernel."""

    def __init__(self) -> None:
        self._outcome = "passed"
        self._reason = ""
        self._properties: dict[str, object] = {}
        self._began = 0.0

    def pytest_runtest_logstart(self) -> None:
        """A test begins."""
        self._begin()

    def _begin(self) -> None:
        self._outcome, self._reason, self._properties, self._began = "passed", "", {}, time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of it. The teardown is the last one of each try."""
        outcome = "failed" if str(report.outcome) == "rerun" else report.outcome
        if _WORST[outcome] > _WORST[self._outcome]:
            self._outcome, self._reason = outcome, _reason(report)
        self._properties |= dict(report.user_properties)
        if report.when == "teardown":
            seconds = round(time.monotonic() - self._began, 1)
            known = {"why": self._reason, "properties": self._properties}
            emit(test=report.nodeid, outcome=self._outcome, seconds=seconds, **known)
            self._begin()


def _reason(report: pytest.TestReport) -> str:
    """Its last lines."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return "\n".join(str(report.longrepr).splitlines()[-12:])


def emit(**what: Any) -> None:
    """A line that the host reads."""
    print(f"\n{MARK}{json.dumps(what)}", flush=True)


def _refused() -> None:
    """What the agent prints on a kernel that is too old."""
    command = [sys.executable, "-m", "gpuwarden", "run"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_SECONDS, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    clear = done.returncode != 0 and len(lines) == 1 and "kernel" in lines[0]
    emit(
        test=REFUSAL,
        outcome="passed" if clear else "failed",
        seconds=round(time.monotonic() - began, 1),
        why="" if clear else f"exit code {done.returncode}",
        properties={"refusal": "\n".join(lines[-5:])},
    )


def _build() -> None:
    """The simulated GPU, where the machine is of another architecture than its host."""
    if not Path("sim/build/bin/gpusim").exists():
        subprocess.run(["make", "-C", "sim", "-j2", "CC=gcc"], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Runs the tests of the features that the kernel's command line names."""
    emit(begins=platform.release(), cpus=len(Path("/sys/devices/system/cpu/online").read_text().split(",")))
    if kernel_version(platform.release()) < OLDEST_KERNEL:
        _refused()
    else:
        _build()
        words = dict(word.partition("=")[::2] for word in Path("/proc/cmdline").read_text().split())
        checks = arguments(words["features"].split(","))
        options = ["-p", "no:cacheprovider", "-o", "addopts=", "--color=no", "--reruns=1", "-q", "--no-summary"]
        pytest.main([*options, *checks], plugins=[Reporter()])
    emit(ends=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
