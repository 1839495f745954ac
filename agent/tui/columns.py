# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which columns fit, and the table that they make.

Columns are given with a priority; as the terminal narrows the least important go first, and what room is left goes to
the names and to the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from rich.table import Table
from rich.text import Text

from agent.tui.cells import Glyphs

Row = Mapping[str, Text]

GAP: Final = 1


@dataclass(frozen=True, slots=True)
class Column:
    """`width` is the least it needs, `most` what it may grow to. Priority 0 is always shown."""

    key: str
    title: str
    width: int
    priority: int = 0
    most: int = 0
    justify: Literal["left", "right"] = "right"


def fit(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit in `width` cells, in their order, grown to fill it."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda column: column.priority):
        if column.priority and _needed([*chosen, column]) > width:
            break
        chosen.append(column)
    ordered = [column for column in columns if column in chosen]
    spare = width - _needed(ordered)
    grown = []
    for column in ordered:
        extra = max(0, min(spare, column.most - column.width))
        spare -= extra
        grown.append(replace(column, width=column.width + extra))
    return grown


def table(columns: Sequence[Column], rows: Iterable[Row], width: int, glyphs: Glyphs) -> Table:
    """The rows under the columns that fit."""
    made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    shown = fit(columns, width)
    for column in shown:
        title = Text(column.title)
        made.add_column(title, width=column.width, justify=column.justify, no_wrap=True, overflow=glyphs.overflow)
    for row in rows:
        made.add_row(*(row.get(column.key, Text()) for column in shown))
    return made


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP
