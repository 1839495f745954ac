# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An item's parts, each of which may fail alone; and rows that compare a figure with what it should be."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpu.here import Unavailable
from gpu.item import blamed
from gpu.row import Row, Verdict, failed, skipped


def part(item: str, whats: Sequence[str], rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Rows of a part. Of `whats`, those that did not come are skipped with why; after a failure the first one fails."""
    seen: set[str] = set()
    try:
        for row in rows():
            seen.add(row.what)
            yield row
    except Unavailable as why:
        yield from (skipped(item, what, str(why)) for what in whats if what not in seen)
    except Exception as error:  # noqa: BLE001 - a part may break in any way, and the others go on
        traceback.print_exc()
        missing = [what for what in whats if what not in seen] or [f"the end of “{whats[-1]}”"]
        yield failed(item, missing[0], blamed(error))
        yield from (skipped(item, what, f"“{missing[0]}” failed before it") for what in missing[1:])


def judged(holds: bool) -> Verdict:
    """Of an assumption."""
    return Verdict.OK if holds else Verdict.DIFFERS


def near(
    item: str, what: str, figure: float | None, baseline: float, within: float, unit: str = "ratio", note: str = ""
) -> Row:
    """OK where the figure is no further than `within` from the baseline; DIFFERS too where there is none."""
    kept = figure is not None and abs(figure - baseline) <= within
    missing = "" if figure is not None else "nothing was told; "
    return Row(
        item=item,
        what=what,
        verdict=judged(kept),
        figure=None if figure is None else round(figure, 4),
        unit=unit,
        baseline=round(baseline, 4),
        note=missing + note,
    )


def holds(
    item: str,
    what: str,
    it_does: bool,
    figure: float | str | bool | None,
    baseline: float | str | bool | None = None,
    note: str = "",
    unit: str = "",
) -> Row:
    """OK or DIFFERS."""
    return Row(item=item, what=what, verdict=judged(it_does), figure=figure, unit=unit, baseline=baseline, note=note)


def measured(
    item: str,
    what: str,
    figure: float | str | bool | None,
    unit: str = "",
    baseline: float | None = None,
    note: str = "",
) -> Row:
    """A figure of which nothing was expected; skipped where there is none."""
    if figure is None:
        return skipped(item, what, note or "nothing was told")
    rounded = round(figure, 4) if isinstance(figure, float) else figure
    return Row(item=item, what=what, verdict=Verdict.MEASURED, figure=rounded, unit=unit, baseline=baseline, note=note)
