# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Figures and names as the cells of a table, figures over time as lines of blocks, and the colours of both. Pure.

Invariants: what is unknown is a dash, never 0; a name is shown, never obeyed (no markup, no escape sequence, nothing
that reorders or hides text); without UTF-8 everything drawn is ASCII; no colour has a meaning of its own: a figure, a
sign or a word is always beside it. Styles have nvitop's names, green, yellow and red; their colours are those that
people with any kind of colour blindness can distinguish (after Okabe and Ito), in one set for dark terminals and one
for light ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from rich.text import Text
from rich.theme import Theme

from agent.core import text
from agent.core.text import Glyphs

GPU_THRESHOLDS: Final = (0.10, 0.75)  # nvitop's, which people know
MEMORY_THRESHOLDS: Final = (0.10, 0.80)
COLOURS: Final = ("green", "yellow", "red")


def printable(value: str, glyphs: Glyphs) -> str:
    """The name as this terminal can show it."""
    shown = text.printable(value)
    return shown.encode("ascii", "backslashreplace").decode() if glyphs.ascii else shown


def name(value: str | None, glyphs: Glyphs, style: str = "") -> Text:
    """A name from outside. Text never reads markup."""
    return Text(printable(value, glyphs) if value else glyphs.missing, style=style)


def bar(ratio: float | None, width: int, thresholds: tuple[float, float], glyphs: Glyphs) -> Text:
    """A bar of `width` cells, coloured by how full it is; empty when unknown."""
    if ratio is None:
        return Text(glyphs.empty * width, style="dim")
    full = min(width, max(0, round(ratio * width)))
    return Text.assemble(
        (glyphs.full * full, colour(ratio, thresholds)),
        (glyphs.empty * (width - full), "dim"),
    )


def colour(ratio: float | None, thresholds: tuple[float, float]) -> str:
    """green, yellow or red; no colour for the unknown."""
    if ratio is None:
        return ""
    return COLOURS[sum(ratio >= threshold for threshold in thresholds)]


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


DARK: Final = {"green": "#1fb28a", "yellow": "#f0e442", "red": "#ee6c2b", "cyan": "#56b4e9", "magenta": "#dd8fbb"}
LIGHT: Final = {"green": "#00735a", "yellow": "#8f6400", "red": "#b33c00", "cyan": "#005f99", "magenta": "#8f3d6d"}
CURSOR_DARK: Final = "#2a3b47"  # behind the line of the cursor
CURSOR_LIGHT: Final = "#d5e3ec"
_LIGHT_BACKGROUNDS: Final = ("7", "15")


def theme(light: bool) -> Theme:
    """For a rich console: each colour by its name, alone and in bold."""
    colours = LIGHT if light else DARK
    return Theme({**colours, **{f"bold {name}": f"bold {colour}" for name, colour in colours.items()}})


def is_light(environment: Mapping[str, str]) -> bool:
    """Whether the terminal says that its background is light, as some do in COLORFGBG."""
    return environment.get("COLORFGBG", "").rpartition(";")[2] in _LIGHT_BACKGROUNDS
