# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver of a run: how it ends early, what it does beside its items, and that its output need not be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.machine_state import MachineSettings, MachineState, unknown_state
from conformance.report.writer import Report
from conformance.runner import Driver, gpus_kept_on
from tools.harness.wait import until

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "conformance", "--simulated", "--quick", "--only", "machine,leftovers", "--out")
# Tells of the libraries, and then hangs.
HANGS = """\
import os, sys, time
print(os.environ["FIRST"], flush=True)
print("half a li", end="", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_report_also_in_the_background(tmp_path: Path, number: signal.Signals) -> None:
    """A shell has what it starts in the background ignore SIGINT."""
    command = ["env", "--ignore-signal=INT", *COMMAND, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "report.json").exists, "a report")
        os.kill(process.pid, number)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert not json.loads((tmp_path / "report.json").read_text())["complete"]


def test_a_signal_that_comes_while_python_runs_text_keeps_the_exit_status() -> None:
    """Such as in the middle of making a dataclass; a bare KeyboardInterrupt makes it a death by SIGINT."""
    program = """\
import sys
from conformance.__main__ import EndedBySignal, end_by_signal
try:
    exec("end_by_signal(15, None)")
except EndedBySignal as ended:
    sys.exit(128 + ended.number)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 128 + signal.SIGTERM


def test_what_it_prints_need_not_be_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*COMMAND, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=120)
    finally:
        os.close(writing)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"], done.stderr
    assert (done.returncode, done.stderr) == (0, b"")


def driver_that_looks(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """With a module of looking that does this."""
    (folder / "conformance").mkdir()
    (folder / "conformance/__init__.py").touch()
    (folder / "conformance/machine_state.py").write_text(program)
    monkeypatch.setattr("conformance.runner.ROOT", folder)
    monkeypatch.setattr("conformance.runner._LOOKING_SECONDS", 1.5)
    return Driver(Report(False, True, version="none"), folder, folder, (folder / "log").open("wb"), show_none)


def show_none(title: str, rows: object) -> None:
    """Shows nothing."""


def test_what_was_seen_before_looking_hangs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = MachineState(False, "/usr/lib/libcuda.so.580", None, "/opt", "not known yet", MachineSettings())
    monkeypatch.setenv("FIRST", first.as_json())
    made = driver_that_looks(tmp_path, HANGS, monkeypatch)
    with made.log:
        assert made._observe() == first


def test_looking_that_sees_nothing_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = driver_that_looks(tmp_path, "raise SystemExit(3)", monkeypatch)
    with made.log:
        seen = made._observe()
    assert seen == unknown_state(False, str(seen.bpf))
    assert "exit status 3" in str(seen.bpf)


@pytest.mark.parametrize(
    ("simulated", "answered", "kept"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_gpus_stay_open_between_programs_where_there_are_any(
    simulated: bool, answered: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("conformance.runner._DEVICES", tmp_path)
    before = MachineSettings({"GPU-1": {"MIG mode": "0"}}) if answered else MachineSettings(why_not="it hung")
    with gpus_kept_on(MachineState(simulated, None, None, "", None, before)):
        assert held(tmp_path) == ({"nvidia0"} if kept else set())
    assert not held(tmp_path)


def held(folder: Path) -> set[str]:
    """Files of a folder that this process has open."""
    targets = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name))
    return {Path(target).name for target in targets if Path(target).parent == folder}


def is_open(descriptor: str) -> bool:
    """Not the one by which they are listed."""
    return os.path.lexists(f"/proc/self/fd/{descriptor}")
