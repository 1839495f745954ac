# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A series as an SVG path in a box of WIDTH × HEIGHT. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.page.ring import Point

WIDTH: Final = 120
HEIGHT: Final = 24
SHORTEST_SECONDS: Final = 30.0  # across: fewer points than this are not stretched any more
HEADROOM: Final = 1.15  # of a scale that has no end of its own


@dataclass(frozen=True, slots=True)
class Graph:
    """`line` and `level` are SVG path data; a line that breaks off where nothing was known, a level across."""

    line: str
    level: str
    label: str  # for those who do not see it


def graph(points: Sequence[Point], label: str, top: float | None = 1.0, level: float | None = None) -> Graph | None:
    """Newest on the right. Without `top` the scale ends a little above the highest point, or the level."""
    known = [value for _, value in points if not math.isnan(value)]
    if not known:
        return None
    if top is None:
        top = max(*known, level or 0.0) * HEADROOM or 1.0
    across = max(SHORTEST_SECONDS, points[0][0])
    return Graph(_line(points, across, top), "" if level is None else f"M0 {_down(level, top)}H{WIDTH}", label)


def _line(points: Sequence[Point], across: float, top: float) -> str:
    drawn: list[str] = []
    begun = 0  # points since the line was last lifted
    for age, value in points:
        if math.isnan(value):
            begun = 0
            continue
        drawn.append(f"{'' if begun else 'M'}{_number(WIDTH * (1 - age / across))} {_down(value, top)}")
        begun += 1
    if begun == 1:  # a point of its own shows as a dot
        drawn.append("h0")
    return " ".join(drawn)


def _down(value: float, top: float) -> str:
    return _number(HEIGHT * (1 - min(1.0, max(0.0, value / top))))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
