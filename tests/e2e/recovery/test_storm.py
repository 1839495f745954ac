# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A short storm of kills: whatever is hurt, every workload runs on, and no other one is touched.

Judged by the invariants alone: `make storm` has the times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.storm.figures import INVARIANTS
from tests.e2e.node import ROOT

KILLS, SEED = 6, 24  # the agent, the guardian, both; killed and stopped; steady, attaching, reloading, upgrading


def test_a_few_kills_leave_every_workload_running_and_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "storm.json"
    command = [sys.executable, "-m", "bench.storm", "--kills", str(KILLS), "--seed", str(SEED), "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["kills"] + found["skipped"] == KILLS
    assert {name: found[name] for name in INVARIANTS} == dict.fromkeys(INVARIANTS, 0)
