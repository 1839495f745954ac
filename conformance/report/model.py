# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An item's parts, each of which may fail alone; and rows that compare a figure with what it should be.

One thing that was looked at, and what was seen. A row is the only thing that an item hands over.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from conformance.host import Unavailable

Figure = float | int | str | bool | None


class Verdict(StrEnum):
    """How a row compares with what was assumed before."""

    OK = "ok"  # an assumption of the design, the simulator, the agent or the field notes holds
    DIFFERS = "differs"  # it does not
    MEASURED = "measured"  # a figure of which nothing was expected
    SKIPPED = "skipped"  # cannot be had here; the note says why
    FAILED = "failed"  # the item itself broke; the note says how


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`what` is unique within its item and the same in every run; the driver adds whether it is real or simulated."""

    item: str  # the name of its module in conformance/checks
    what: str
    verdict: Verdict
    figure: Figure = None
    unit: str = ""  # of both figures: "", "ns", "µs", "ms", "s", "1/s", "ratio", "bytes"
    baseline: Figure = None  # what the figure is to be compared with: of the same run, or what was expected
    note: str = ""  # one sentence: why, or what it means

    def as_json(self) -> str:
        """The row as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


def row_from(given: Mapping[str, Any]) -> Row:
    """The row that was made into this. ValueError, TypeError or KeyError where it is none."""
    return Row(**{**given, "verdict": Verdict(given["verdict"])})


def skipped(item: str, what: str, why: str) -> Row:
    """A row for what cannot be had here."""
    return Row(item=item, what=what, verdict=Verdict.SKIPPED, note=why)


def failed(item: str, what: str, how: str) -> Row:
    """A row for what broke."""
    return Row(item=item, what=what, verdict=Verdict.FAILED, note=how)


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
    """The verdict on an assumption."""
    return Verdict.OK if holds else Verdict.DIFFERS


def near(
    item: str, what: str, figure: float | None, baseline: float, within: float, unit: str = "ratio", note: str = ""
) -> Row:
    """OK where the figure is no further than `within` from the baseline; DIFFERS too where there is none."""
    kept = figure is not None and abs(figure - baseline) <= within
    missing = "" if figure is not None else "nothing was reported; "
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
        return skipped(item, what, note or "nothing was reported")
    rounded = round(figure, 4) if isinstance(figure, float) else figure
    return Row(item=item, what=what, verdict=Verdict.MEASURED, figure=rounded, unit=unit, baseline=baseline, note=note)


def blamed(error: Exception) -> str:
    """The error in one line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}{place}"
