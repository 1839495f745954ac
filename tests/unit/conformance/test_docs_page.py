# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""docs/on-a-real-gpu.md: what was seen is shown with where and when, what was not is shown as unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conformance import checks
from conformance.checks import Item
from conformance.host import Host
from conformance.report.docs_page import (
    BEGIN,
    PAGE,
    QUESTIONS,
    UNMEASURED,
    ReportError,
    all_items,
    keep,
    kept,
    main,
    newest,
    page,
    seen,
    tables,
)
from conformance.report.model import Row, Verdict


def nothing(host: Host) -> Iterator[Row]:
    raise NotImplementedError


ITEM = Item("probes", "what a probe costs", 30, ("ns per hit", "{symbol} is probed"), nothing, 30)


def report(*rows: Row, **changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "source": "real",
        "quick": False,
        "complete": True,
        "date": "2026-11-22T18:42:45+00:00",
        "gpu": "NVIDIA H100",
        "driver": "580.1",
        "rows": [{**asdict(row), "source": "real"} for row in rows],
        **changes,
    }


def hit(figure: float, verdict: Verdict = Verdict.MEASURED, what: str = "ns per hit") -> Row:
    return Row(item="probes", what=what, verdict=verdict, figure=figure, unit="ns")


def test_the_page_is_what_items_and_reports_make_of_it() -> None:
    assert PAGE.read_text() == page(PAGE.read_text(), all_items(), kept()), (
        "run: python -m conformance.report.docs_page"
    )


def test_the_page_names_every_row_that_an_item_can_yield() -> None:
    text = PAGE.read_text().replace("\\", "")
    seen = [one.row.what for one in kept()]  # these stand there instead
    whats = [what for item in all_items() for what in item.what if what not in text]
    assert not [what for what in whats if not any(checks.lists(what, one) for one in seen)]


def test_every_question_is_settled_by_a_row_that_there_is() -> None:
    known = {(item.name, what) for item in all_items() for what in item.what}
    assert not [one for one in QUESTIONS if (one.item, one.what) not in known]


def test_what_was_not_seen_is_shown_as_unknown() -> None:
    text = tables([ITEM], [])
    assert f"| ns per hit | | | | {UNMEASURED} |" in text
    assert f"| {{symbol}} is probed | | | | {UNMEASURED} |" in text


def test_what_was_seen_is_shown_with_where_and_when() -> None:
    given = seen(report(hit(310.0), hit(1, Verdict.OK, "cuMemAlloc_v2 is probed"), hit(2, what="a surprise")), "report")
    text = tables([ITEM], given)
    assert "| ns per hit | 310 ns | | measured | 2026-11-22, NVIDIA H100, driver 580.1 |" in text
    assert r"| cuMemAlloc\_v2 is probed | 1 ns | | ok |" in text
    assert "| a surprise | 2 ns | | measured |" in text
    assert UNMEASURED not in text.split("### What a probe costs")[1]


def test_what_was_skipped_is_shown_and_still_unknown() -> None:
    skipped = Row(item="probes", what="ns per hit", verdict=Verdict.SKIPPED, note="no BPF")
    text = tables([ITEM], seen(report(skipped), "report"))
    assert "| skipped: no BPF |" in text
    assert f"| ns per hit | | | | {UNMEASURED} |" in text


def test_the_newest_of_a_gpu_counts_and_one_that_was_skipped_hides_none() -> None:
    old = seen(report(hit(1.0), date="2026-11-01"), "old")
    new = seen(report(hit(2.0), date="2026-11-02"), "new")
    other = seen(report(hit(3.0), date="2026-11-01", gpu="NVIDIA H200"), "other")
    none = seen(report(Row(item="probes", what="ns per hit", verdict=Verdict.SKIPPED), date="2026-11-03"), "none")
    assert {one.row.figure for one in newest([*none, *new, *other, *old])} == {2.0, 3.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "simulated"}, "simulated"),
        ({"rows": [{**asdict(hit(1.0)), "source": "simulated"}]}, "simulated"),
        ({"quick": True}, "quick"),
        ({"gpu": None}, "which GPU"),
        ({"format": 0}, "format"),
        ({"rows": [{"source": "real"}]}, "no report"),
        ({"rows": 3}, "no report"),
    ],
)
def test_only_a_run_on_a_real_gpu_is_a_source(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        seen(report(hit(1.0), **changes), "report.json")


def test_of_a_run_that_was_cut_off_the_rows_that_are_there_count() -> None:
    (one,) = seen(report(hit(1.0), complete=False), "report.json")
    assert one.row.figure == 1.0


def test_two_reports_of_one_day_are_both_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.report.docs_page.RESULTS", tmp_path / "results")
    given = tmp_path / "report.json"
    for date in ("2026-11-22T18:42:45+00:00", "2026-11-22T19:00:00+00:00"):
        given.write_text(json.dumps(report(hit(1.0), date=date)))
        keep(given)
    names = [path.name for path in sorted((tmp_path / "results").iterdir())]
    assert names == ["2026-11-22-184245-nvidia-h100.json", "2026-11-22-190000-nvidia-h100.json"]


def test_a_simulated_report_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "report.json"
    given.write_text(json.dumps(report(hit(1.0), source="simulated")))
    before = PAGE.read_text()
    assert main([str(given)]) == 2
    assert "what real ones do" in capsys.readouterr().err
    assert PAGE.read_text() == before


def test_a_page_without_its_marker_is_left_alone() -> None:
    with pytest.raises(ValueError, match="put it where"):
        page("# A page\n", [ITEM], [])
    assert page(f"# A page\n{BEGIN}\nold", [ITEM], []).startswith(f"# A page\n{BEGIN}\n\n### What was open")


def test_rows_of_an_item_are_found_by_its_patterns_alone() -> None:
    assert checks.lists(ITEM.what[1], "cuLaunchKernel is probed")
