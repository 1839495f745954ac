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

from tests.driver.conftest import MAJORS, fetched

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers are for x86-64")
def test_it_has_a_row_for_each_library(tmp_path: Path) -> None:
    for major in MAJORS:
        fetched(major, "usr")
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "bench", "probes", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    rows = {row["library"]: row for row in json.loads(file.read_text())}
    assert {name: row["place"] for name, row in rows.items()} == {
        **dict.fromkeys((*MAJORS, "simulated"), 10),
        "simulated, plain": 0,
    }
    for row in rows.values():
        assert 0 < row["bare_us"] < row["at_place_us"] < row["watched_us"]
        assert row["at_place_us"] < row["at_place_with_return_us"]
