# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which columns fit, and the lines that they make.

Columns are given with a priority; as the terminal narrows the least important go first, and what room is left goes to
the names and to the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

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


def line(columns: Sequence[Column], row: Row, glyphs: Glyphs) -> Text:
    """One row under columns that fit."""
    made = Text(no_wrap=True)
    for column in columns:
        if made:
            made.append(" " * GAP)
        made.append_text(_cell(row.get(column.key), column, glyphs))
    return made


def header(columns: Sequence[Column], glyphs: Glyphs, sorted_by: str = "", reverse: bool = False) -> Text:
    """The titles; the one that is sorted by stands out, with an arrow where there is room for one."""
    titles = {column.key: Text(column.title, style="bold") for column in columns}
    if sorted_by in titles:
        column = next(column for column in columns if column.key == sorted_by)
        arrow = glyphs.rising if reverse else glyphs.falling
        titles[sorted_by] = Text(f"{column.title}{arrow}"[: column.width], style="bold reverse")
    return line(columns, titles, glyphs)


def _cell(cell: Text | None, column: Column, glyphs: Glyphs) -> Text:
    made = cell.copy() if cell is not None else Text()
    made.truncate(column.width, overflow=glyphs.overflow)
    left = column.width - made.cell_len
    if column.justify == "right":
        made.pad_left(left)
    else:
        made.pad_right(left)
    return made


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP
