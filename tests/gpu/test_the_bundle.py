# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance` on this machine's own GPU: nothing fails. What differs from what we expected is for
people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LONGEST_SECONDS = 600


def test_no_row_of_a_real_gpu_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conformance", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LONGEST_SECONDS)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["source"] == "real"
    assert report["complete"]
    assert report["gpu"], "no GPU was found"
    assert not [row for row in report["rows"] if row["verdict"] == "failed"], done.stdout
