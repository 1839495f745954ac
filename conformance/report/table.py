# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows for people: a table where rich is there and the terminal is wide enough, else lines."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Final, TextIO

from conformance.report.model import Figure, Row, Verdict

_NARROW: Final = 100  # columns; a table would be all line breaks
_UNKNOWN_WIDTH: Final = 160
_COLOURS: Final = {
    Verdict.OK: "green",
    Verdict.DIFFERS: "yellow",
    Verdict.MEASURED: "cyan",
    Verdict.SKIPPED: "dim",
    Verdict.FAILED: "bold red",
}
_BINARY: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


def shower(out: TextIO) -> Callable[[str, Sequence[Row]], None]:
    """A function that prints the rows of one item below its title."""
    width = shutil.get_terminal_size((_UNKNOWN_WIDTH, 24)).columns
    if out.isatty() and width >= _NARROW and os.environ.get("TERM") != "dumb":
        try:
            return _rich(out)
        except ImportError:
            pass
    return lambda title, rows: print("\n".join([title, *lines(rows, width), ""]), file=out, flush=True)


def lines(rows: Sequence[Row], width: int) -> list[str]:
    """Without rich: a line each, folded where it is longer than the terminal."""
    found = []
    for row in rows:
        text = ": ".join(part for part in (row.what, measured(row)) if part)
        whole = f"{row.verdict:<8} {text}{f' — {row.note}' if row.note else ''}"
        found += textwrap.wrap(whole, max(width - 2, 20), initial_indent="  ", subsequent_indent=" " * 11) or [""]
    return found


def measured(row: Row) -> str:
    """The figure and what it is compared with."""
    figure, baseline = (shown(value, row.unit) for value in (row.figure, row.baseline))
    return f"{figure} (against {baseline})" if figure and baseline else figure or (baseline and f"against {baseline}")


def shown(value: Figure, unit: str) -> str:
    """A figure with its unit; "" for an unknown one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return _bytes(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return number if unit in ("", "ratio") else f"{number} {unit}"


def _bytes(value: float) -> str:
    size = float(value)
    for unit in _BINARY[:-1]:
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} {_BINARY[-1]}"


def _rich(out: TextIO) -> Callable[[str, Sequence[Row]], None]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=out, highlight=False)

    def show(title: str, rows: Sequence[Row]) -> None:
        table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0), expand=True)
        table.add_column("", width=8, no_wrap=True)
        for name, ratio in (("what", 5), ("figure", 3), ("against", 2), ("note", 6)):
            table.add_column(name, ratio=ratio, min_width=8, overflow="fold")
        for row in rows:
            cells = (row.what, shown(row.figure, row.unit), shown(row.baseline, row.unit), row.note)
            table.add_row(Text(row.verdict, style=_COLOURS[row.verdict]), *(Text(cell) for cell in cells))
        console.print(table)
        console.print()

    return show
