# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows of a run on a GPU: to JSON and back, on the terminal, and the command line that asks for them."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import checks
from conformance.__main__ import LIMIT_SECONDS, main, names, parser
from conformance.host import Host
from conformance.report.model import Row, Verdict, failed, row_from, skipped
from conformance.report.table import lines, measured, shower, shown
from conformance.report.writer import Report, summary
from conformance.runner import LAST, allotted

ROOT = Path(__file__).parents[3]
HIT = Row(item="probes", what="a hit", verdict=Verdict.MEASURED, figure=310.25, unit="ns", baseline=300, note="Mean.")
FREE_OF_PACKAGES = (
    *("__init__", "__main__", "host", "isolation", "process_tree", "runner"),
    *("report/model", "report/table", "report/writer"),
)
WAITING = ("tools/__init__.py", "tools/harness/__init__.py", "tools/harness/wait.py")


def test_a_row_is_a_line_of_json_and_comes_back() -> None:
    assert row_from(json.loads(HIT.as_json())) == HIT
    assert "\n" not in HIT.as_json()


def test_what_is_no_row_is_refused() -> None:
    for given in ({}, {"verdict": "good"}, {**json.loads(HIT.as_json()), "colour": "red"}):
        with pytest.raises((KeyError, ValueError, TypeError)):
            row_from(given)


def test_a_figure_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        Row(item="a", what="b", verdict=Verdict.MEASURED, figure=float("nan")).as_json()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "ns", ""),
        (True, "", "yes"),
        (False, "", "no"),
        ("580.159", "", "580.159"),
        (0.123456, "ratio", "0.1235"),
        (1234567, "1/s", "1,234,567 1/s"),
        (12345.6, "µs", "12,346 µs"),
        (80 << 30, "bytes", "80 GiB"),
        (5, "bytes", "5 bytes"),
    ],
)
def test_a_figure_is_shown_with_its_unit(value: float | str | bool | None, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_a_figure_is_shown_beside_what_it_is_compared_with() -> None:
    assert measured(HIT) == "310.2 ns (against 300 ns)"
    assert measured(Row(item="a", what="b", verdict=Verdict.OK, figure=0, baseline=0)) == "0 (against 0)"
    assert measured(skipped("a", "b", "why")) == ""


def test_a_narrow_terminal_folds_rows_and_loses_nothing() -> None:
    found = lines([HIT, skipped("probes", "another", "no BPF on this kernel, which is a sandbox")], 40)
    assert max(map(len, found)) <= 40
    assert " ".join(" ".join(found).split()) == (
        "measured a hit: 310.2 ns (against 300 ns) — Mean. skipped another — no BPF on this kernel, which is a sandbox"
    )


def test_without_a_terminal_a_row_is_a_line() -> None:
    out = io.StringIO()
    shower(out)("probes", [HIT])
    assert out.getvalue() == "probes\n  measured a hit: 310.2 ns (against 300 ns) — Mean.\n\n"


class Terminal(io.StringIO):
    """A wide one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "cells"), [("140", True), ("60", False)])
def test_a_terminal_that_is_wide_enough_gets_a_table(
    columns: str, cells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    shower(out)("probes: what they cost", [HIT, failed("probes", "another", "a [bold] word")])
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert ("figure" in text.splitlines()[1].split()) == cells
    assert max(map(len, text.splitlines())) <= int(columns)
    for word in ("what they cost", "a hit", "310.2 ns", "Mean.", "another", "[bold]", "measured"):
        assert word in text


def test_each_row_of_a_report_shows_whether_it_is_real(tmp_path: Path) -> None:
    report = Report(simulated=True, quick=True)
    report.rows += [HIT, Row(item="machine", what="GPU", verdict=Verdict.MEASURED, figure="Simulated H200")]
    written = json.loads(report.write(tmp_path).read_text())
    assert [row["source"] for row in written["rows"]] == ["simulated", "simulated"]
    assert (written["gpu"], written["driver"], written["complete"]) == ("Simulated H200", None, False)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_the_summary_counts_verdicts() -> None:
    assert summary([HIT, failed("a", "b", "c"), HIT]) == "2 measured, 1 failed"
    assert summary([]) == "no rows"


def test_items_are_run_in_their_order() -> None:
    assert names("leftovers, machine") == ("machine", "leftovers")
    assert parser().parse_args([]).only == checks.ORDER


def test_where_it_was_is_looked_at_whatever_else_is() -> None:
    assert names("probes") == ("machine", "probes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "machine,typo"], "no item typo; there are machine, exports"),
        (["--only", ","], "no item named"),
        (["--limit-seconds", "soon"], "'soon' is no number of seconds above 0"),
        (["--limit-seconds", "nan"], "'nan' is no number"),
        (["--limit-seconds", "-1"], "'-1' is no number"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "below")]) == 2
    assert "name another folder with --out" in capsys.readouterr().err


def test_all_items_together_stay_within_a_run() -> None:
    everything = [checks.item(name) for name in checks.ORDER]
    assert sum(item.least_seconds for item in everything) <= LIMIT_SECONDS
    for item in everything:
        assert item.least_seconds <= item.seconds
        assert item.what
        assert len(set(item.what)) == len(item.what)


def test_an_item_that_sets_no_least_time_can_do_with_most_of_it() -> None:
    exports = checks.item("exports")
    assert exports.least_seconds == pytest.approx(0.7 * exports.seconds)
    assert checks.item(LAST).least_seconds == checks.item(LAST).seconds


def none(host: Host) -> Iterator[Row]:
    raise NotImplementedError


def times(hangs: str = "", cleaning: float = 0.0) -> dict[str, float | None]:
    """What each item gets where all take all that they get, and one takes so much more to be ended."""
    everything, now = [checks.item(name) for name in checks.ORDER], 0.0
    given: dict[str, float | None] = {}
    for number, item in enumerate(everything):
        after = sum(one.least_seconds for one in everything[number + 1 :])
        given[item.name] = allotted(item, LIMIT_SECONDS - after - now)
        now += (given[item.name] or 0.0) + (cleaning if item.name == hangs else 0.0)
    return given


def test_items_that_take_all_they_get_leave_every_later_one_what_is_kept_for_it() -> None:
    given = times()
    assert sum(seconds or 0.0 for seconds in given.values()) <= LIMIT_SECONDS
    for name, seconds in given.items():
        assert seconds is not None
        assert seconds >= checks.item(name).least_seconds


@pytest.mark.parametrize("hangs", checks.ORDER)
def test_no_item_is_left_out_because_one_before_it_took_long_to_be_ended(hangs: str) -> None:
    assert None not in times(hangs, cleaning=8.0).values()


@pytest.mark.parametrize(("left", "given"), [(500.0, 200.0), (120.0, 120.0), (35.0, 35.0), (34.0, None), (-3.0, None)])
def test_an_item_gets_what_is_left_and_no_less_than_it_needs(left: float, given: float | None) -> None:
    assert allotted(checks.Item("enforcement", "", 200.0, ("a",), none, 50.0), left) == given


def test_the_last_item_is_looked_at_however_late_it_is() -> None:
    assert allotted(checks.Item(LAST, "", 10.0, ("a",), none, 10.0), -100.0) == 10.0


def test_braces_in_a_line_stand_for_names_and_nothing_else_does() -> None:
    assert checks.lists("{symbol}: pointer (is) the export", "cuMemAlloc_v2: pointer (is) the export")
    assert not checks.lists("{symbol}: pointer", "cuMemAlloc_v2: another")
    assert not checks.lists("a.c", "abc")


def test_an_item_that_does_not_exist_is_no_module_of_ours() -> None:
    with pytest.raises(KeyError):
        checks.item("os")


@pytest.mark.parametrize("path", [*(f"conformance/{name}.py" for name in FREE_OF_PACKAGES), *WAITING])
def test_the_driver_needs_nothing_but_the_standard_library_to_begin(path: str) -> None:
    """Wherever Python is, it runs, and names what is missing. How it waits is in another package, as free of others."""
    tree = ast.parse((ROOT / path).read_text())
    imported = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names]
    imported += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    others = {one for one in imported if one != "tools.harness.wait"}
    assert {one.split(".")[0] for one in others} <= {*sys.stdlib_module_names, "conformance"}
