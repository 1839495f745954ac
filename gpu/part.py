# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Parts of an item, each of which may fail alone; and rows that compare a figure with what it should be."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

from gpu.here import Unavailable
from gpu.row import Row, Verdict, failed, skipped


def part(item: str, what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Its rows. What it cannot have, and what breaks in it, is one row more, called `what`."""
    try:
        yield from rows()
    except Unavailable as why:
        yield skipped(item, what, str(why))
    except Exception as error:  # noqa: BLE001  # one surprise costs one part, not the item
        traceback.print_exc(file=sys.stderr)
        yield failed(item, what, f"{type(error).__name__}: {error}")


def near(
    item: str, what: str, figure: float | None, baseline: float, within: float, unit: str = "ratio", note: str = ""
) -> Row:
    """OK where the figure is no further than `within` from the baseline; DIFFERS too where there is none."""
    holds = figure is not None and abs(figure - baseline) <= within
    missing = "" if figure is not None else "nothing was told; "
    return Row(
        item=item,
        what=what,
        verdict=Verdict.OK if holds else Verdict.DIFFERS,
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
    verdict = Verdict.OK if it_does else Verdict.DIFFERS
    return Row(item=item, what=what, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=note)


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
