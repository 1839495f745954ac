# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""All that is to be asked of a real GPU, asked of the simulated one: so it works on the day when there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance import checks
from conformance.checks.checkpoint.neighbours import STAYS
from conformance.isolation import WHOLE

ROOT = Path(__file__).parents[3]
_LONGEST_SECONDS = 400  # 90 on a quiet machine
_MEASURED = ("ns", "µs", "ms", "s", "1/s", "bytes/s", "ratio")  # units


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a quick run of everything, with what it showed and logged."""
    out = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "conformance", "--simulated", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LONGEST_SECONDS)
    assert done.returncode in (0, 1), done.stderr
    return {**json.loads((out / "report.json").read_text()), "shown": done.stdout, "log": (out / "log.txt").read_text()}


def rows(report: dict[str, Any], item: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["item"] == item]


def test_nothing_fails_on_the_simulated_gpu(report: dict[str, Any]) -> None:
    failed = [row for row in report["rows"] if row["verdict"] == "failed"]
    assert not failed, report["log"][-8000:]
    assert report["complete"]


@pytest.mark.parametrize("name", checks.ORDER)
def test_an_item_yields_the_rows_that_it_announces(name: str, report: dict[str, Any]) -> None:
    found = rows(report, name)
    assert found
    patterns = (*checks.item(name).what, WHOLE)
    unknown = [row["what"] for row in found if not any(checks.lists(pattern, row["what"]) for pattern in patterns)]
    assert not unknown, "not in its WHAT, so not in the documentation"


def test_an_item_takes_part_in_more_than_saying_that_it_cannot(report: dict[str, Any]) -> None:
    silent = [name for name in checks.ORDER if all(row["verdict"] == "skipped" for row in rows(report, name))]
    assert silent in ([], ["frameworks"])  # there are none


def test_what_is_skipped_has_its_reason(report: dict[str, Any]) -> None:
    assert not [row for row in report["rows"] if row["verdict"] == "skipped" and not row["note"]]


def is_measured(row: dict[str, Any]) -> bool:
    """Whether a busy machine changes the figure: a time, a rate, a share, a quotient, what was served."""
    figure = row["figure"]
    is_quotient = isinstance(figure, float) and not figure.is_integer()
    return row["unit"] in _MEASURED or is_quotient or row["what"] == STAYS


def test_no_answer_or_count_differs_on_the_simulated_gpu(report: dict[str, Any]) -> None:
    """What was measured is printed: a busy machine makes it differ, and `make gpu-bundle` tells how to judge it."""
    differing = [row for row in report["rows"] if row["verdict"] == "differs"]
    measured = [row for row in differing if is_measured(row)]
    print(*(f"{row['item']}: {row['what']}: {row['figure']} {row['unit']}" for row in measured), sep="\n")
    assert [row for row in differing if row not in measured] == [], "mend the simulator or the expectation"


def test_every_row_is_marked_as_simulated(report: dict[str, Any]) -> None:
    assert {row["source"] for row in report["rows"]} == {report["source"]} == {"simulated"}


def test_rows_are_shown_as_they_are_written(report: dict[str, Any]) -> None:
    shown = " ".join(report["shown"].split())  # whatever the width of the lines
    assert not [row["what"] for row in report["rows"] if row["what"] not in shown]


def test_the_machine_is_as_it_was(report: dict[str, Any]) -> None:
    left = {row["what"]: row["verdict"] for row in rows(report, "leftovers")}
    assert {"processes of this run are gone", "control groups of this run are gone"} <= left.keys()
    assert set(left.values()) == {"ok"}
