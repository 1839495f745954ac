# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Figures over time, as lines of blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from agent.tui.cells import Glyphs, colour

NO_THRESHOLDS = (float("inf"), float("inf"))


def graph(
    values: Sequence[float | None],
    height: int,
    most: float,
    glyphs: Glyphs,
    thresholds: tuple[float, float] = NO_THRESHOLDS,
    style: str = "",
) -> list[Text]:
    """`height` lines, a cell wide for each value; `most` fills the height. Unknown is empty, and nothing a little.

    Coloured by the thresholds, which are parts of `most`, or else in one style.
    """
    steps = len(glyphs.steps) - 1
    levels = [_level(value, most, height * steps) for value in values]
    styles = [style or colour(value / most if value is not None and most else None, thresholds) for value in values]
    lines = []
    for below in range((height - 1) * steps, -1, -steps):
        line = Text(no_wrap=True)
        for shade, run in groupby(zip(styles, levels, strict=True), itemgetter(0)):
            line.append("".join(glyphs.steps[min(steps, max(0, level - below))] for _, level in run), shade)
        lines.append(line)
    return lines


def _level(value: float | None, most: float, whole: int) -> int:
    """How many steps high: what is known is at least one, so that 0 is not taken for unknown."""
    if value is None:
        return 0
    return min(whole, max(1, round(value / most * whole))) if most > 0 else 1
