# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench probes` measures every library that is here; how fast is for the bench to say."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bench.latency.probes import holds
from tests.driver.conftest import MAJORS, fetched

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers are for x86-64")
def test_it_has_a_row_for_each_library(tmp_path: Path) -> None:
    for major in MAJORS:
        fetched(major, "usr")
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench", "probes", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert file.exists(), done.stderr
    rows = {row["library"]: row for row in json.loads(file.read_text())}
    assert {name: row["place"] for name, row in rows.items()} == {
        **dict.fromkeys((*MAJORS, "simulated"), 10),
        "simulated, plain": 0,
    }
    for row in rows.values():
        for column in ("bare_us", "at_entry_us", "at_place_us", "at_place_with_return_us", "watched_us"):
            least, most = row["range_us"][column]
            assert 0 < least == row[column] == most, (row["library"], column)
        assert row["at_place_per_at_entry"] == pytest.approx(row["at_place_us"] / row["at_entry_us"], abs=0.01)
    assert done.returncode == (0 if all(map(holds, rows.values())) else 1)
