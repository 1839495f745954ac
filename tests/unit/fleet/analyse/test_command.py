# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet analyse`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.analyse.command import PARTS
from fleet.analyse.published import MARKS, PUBLISHED
from fleet.command import main
from fleet.model import TraceJob
from fleet.traces import FORMATS

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"
ROWS = "2017-10-09 07:01:55,66,1,66,a\n2017-10-09 08:01:55,6600,8,52800,\x1b[31mred\nbroken,1,1,1,b\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "philly.csv"
    path.write_text(HEADER + ROWS)
    return path


def test_the_text_has_tables_what_is_absent_and_what_was_dropped(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyse", str(trace), "--format", "philly_csv"]) == 0
    out, err = capsys.readouterr()
    assert "Jobs and runtimes by size" in out
    assert "Status by jobs and GPU time (Philly's Table 6): no status" in out
    assert "dropped: 1 rows: time of submission is no date" in out
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    assert "52.32" not in out
    assert err == ""  # no progress where standard error is no terminal


def test_published_figures_stand_beside_with_their_marks(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(trace), "--format", "philly_csv", "--published"]) == 0
    out = capsys.readouterr().out
    assert "96,260 in the paper's window [N]" in out
    assert "52.32 [N]" in out
    for mark in "NS":
        assert f"[{mark}] {MARKS[mark]}" in out


def test_the_json_has_numbers_and_leaves_out_what_is_absent(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(trace), "--format", "philly_csv", "--json", "--published"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dropped"] == {"time of submission is no date": 1}
    assert [row["jobs"] for row in found["tables"]["sizes"]["rows"]] == [1, 1]
    assert found["tables"]["sizes"]["estimated"] is None
    assert found["absent"]["status"]["lacks"] == "status"
    assert "status" not in found["tables"]
    assert found["published"]["utilisation/all"] == {"text": "52.32", "mark": "N"}


def test_a_file_that_is_no_trace_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyse", str(tmp_path / "none.csv"), "--format", "philly_csv"]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_what_is_published_is_of_known_formats_and_marks_and_has_a_table() -> None:
    names = {part([TraceJob("a", 0.0, 1, 1.0)]).name for part in PARTS}
    for name, figures in PUBLISHED.items():
        assert name in FORMATS
        for (table, _), figure in figures.items():
            assert table in names
            assert figure.mark in MARKS
