# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcement bench, a short run of it: its rows are complete, and nothing is left behind. No figure is judged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from bench.enforcement import __main__
from bench.enforcement.figures import COLUMNS
from bench.enforcement.modes import OWN_SETTLE
from tools.harness import cgroups


def test_the_rows_are_what_was_promised_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OWN_SETTLE, "headroom", 2.0)  # no law has found its share by then
    file, report = tmp_path / "rows.json", tmp_path / "page.md"
    where = ["--json", str(file), "--report", str(report)]
    status = __main__.main(
        ["--isolated", "--pairs", "load50", "--modes", "mps_static,headroom@3", "--seconds", "2", *where]
    )
    rows = json.loads(file.read_text())
    assert [(row["pair"], row["mode"]) for row in rows] == [
        ("load50", "alone"),
        ("load50", "mps_static"),
        ("load50", "headroom@3"),
    ]
    for row in rows:
        assert all(math.isfinite(row[column]) for column in COLUMNS[2:])
        assert row["requests"] > 100
        assert 0 <= row["slo_miss_ratio"] <= 1
        assert row["online_p50_ratio"] > 0
    alone, *others = rows
    assert alone["online_p99_ratio"] == 1
    assert alone["offline_left_over_ratio"] == 0
    assert all(row["offline_left_over_ratio"] > 0 for row in others)
    assert 0 < alone["left_ratio"] < 1
    assert status in (0, 1)
    assert "| load50 | headroom@3 |" in report.read_text()
    assert not cgroups.folders(f"/gpuwarden-bench-{os.getpid()}")
