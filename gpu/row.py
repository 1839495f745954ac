# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One thing that was looked at, and what was seen. A row is the only thing that an item hands over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

Figure = float | int | str | bool | None


class Verdict(StrEnum):
    """What a row says of what was assumed before."""

    OK = "ok"  # an assumption of the design, the simulator, the agent or the field notes holds
    DIFFERS = "differs"  # it does not
    MEASURED = "measured"  # a figure of which nothing was expected
    SKIPPED = "skipped"  # cannot be had here; the note says why
    FAILED = "failed"  # the item itself broke; the note says how


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`what` is unique within its item and the same in every run; the driver adds whether it is real or simulated."""

    item: str  # the name of its module in gpu/items
    what: str
    verdict: Verdict
    figure: Figure = None
    unit: str = ""  # of both figures: "", "ns", "µs", "ms", "s", "1/s", "ratio", "bytes"
    baseline: Figure = None  # what the figure is to be compared with: of the same run, or what was expected
    note: str = ""  # one sentence: why, or what it means

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


def row_from(given: Mapping[str, Any]) -> Row:
    """The row that was made into this. ValueError, TypeError or KeyError where it is none."""
    return Row(**{**given, "verdict": Verdict(given["verdict"])})


def skipped(item: str, what: str, why: str) -> Row:
    """What cannot be had here."""
    return Row(item=item, what=what, verdict=Verdict.SKIPPED, note=why)


def failed(item: str, what: str, how: str) -> Row:
    """What broke."""
    return Row(item=item, what=what, verdict=Verdict.FAILED, note=how)
