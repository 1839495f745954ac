# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m gpu` as a process: how it ends early, and that nobody has to read what it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "gpu", "--simulated", "--quick", "--only", "machine,leftovers", "--out")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_a_report_also_in_the_background(tmp_path: Path, number: signal.Signals) -> None:
    """A shell has what it starts in the background ignore SIGINT."""
    command = ["env", "--ignore-signal=INT", *COMMAND, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "report.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert not json.loads((tmp_path / "report.json").read_text())["complete"]


def test_nobody_has_to_read_what_it_prints(tmp_path: Path) -> None:
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
