# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet analyse TRACE`: a trace's tables, on the terminal or as JSON.

A table that the trace lacks the columns for is named with what is missing, and has no figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table as Grid
from rich.text import Text

from fleet.analyse import load, locality, queueing, sizes, status
from fleet.analyse.published import MARKS, PUBLISHED, Place, Published
from fleet.analyse.tables import Absent, Table
from fleet.model import FleetError, Trace, TraceJob, printable
from fleet.traces import FORMATS, Progress, read_trace

Part = Callable[[Sequence[TraceJob]], Table | Absent]

PARTS: Final[tuple[Part, ...]] = (
    sizes.whole,
    sizes.runtimes,
    sizes.sharing,
    load.hours,
    load.queues,
    load.in_use,
    queueing.delays,
    queueing.causes,
    locality.delays,
    locality.utilisation,
    locality.spread,
    status.endings,
    status.attempts,
)
_MOST_ROWS: Final = 40  # of a table on the terminal
_WIDTH: Final = 120  # where the output is no terminal, so that a pipe gets whole columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the trace's file; one that ends in .gz is unpacked")
    parser.add_argument(
        "--format", required=True, choices=list(FORMATS), help="its format; `gpuwarden fleet formats` explains them"
    )
    parser.add_argument(
        "--published", action="store_true", help="also print what was published, with how it came here as a mark"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all rows of all tables")


def act(options: argparse.Namespace) -> int:
    with _progress(f"reading {options.trace}") as progress:
        trace = read_trace(options.trace, options.format, progress)
    parts = analyse(trace)
    published = PUBLISHED.get(options.format, {}) if options.published else {}
    if options.json:
        about = {"trace": str(options.trace), "format": options.format, "dropped": dict(trace.dropped)}
        print(json.dumps({**about, **as_json(parts, published)}, indent=1))
    else:
        _print(trace, parts, published)
    return 0


def analyse(trace: Trace) -> tuple[Table | Absent, ...]:
    """All tables. FleetError: the trace has no job."""
    if not trace.jobs:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in trace.dropped.most_common())
        raise FleetError(f"the trace has no job; rows dropped: {reasons or 'none'}")
    return tuple(part(trace.jobs) for part in PARTS)


def as_json(parts: Sequence[Table | Absent], published: Mapping[Place, Published]) -> dict[str, Any]:
    """`tables` by name with their rows as objects, and `absent` by name with what the trace lacks."""
    return {
        "tables": {part.name: _table_json(part, published) for part in parts if isinstance(part, Table)},
        "absent": {part.name: {"title": part.title, "lacks": part.lacks} for part in parts if isinstance(part, Absent)},
        "published": {
            f"{name}/{row}" if row else name: {"text": figure.text, "mark": figure.mark}
            for (name, row), figure in published.items()
        },
    }


def _table_json(part: Table, published: Mapping[Place, Published]) -> dict[str, Any]:
    names = [column.name for column in part.columns]
    rows = [dict(zip(names, row, strict=True)) for row in part.rows]
    for row, cells in zip(rows, part.rows, strict=True):
        if figure := published.get((part.name, str(cells[0]))):
            row["published"] = str(figure)
    return {"title": part.title, "estimated": part.estimated or None, "rows": rows}


def _print(trace: Trace, parts: Sequence[Table | Absent], published: Mapping[Place, Published]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    for part in parts:
        if isinstance(part, Table):
            _print_table(console, part, published)
    absent = [part for part in parts if isinstance(part, Absent)]
    if absent:
        console.print("Absent, as the trace lacks the columns:", style="bold")
    for missing in absent:
        console.print(Text(f"  {missing.title}: no {missing.lacks}"))
        for (name, row), figure in published.items():
            if name == missing.name:
                console.print(Text(f"    published{', ' + row if row else ''}: {figure}"))
    for reason, count in trace.dropped.most_common():
        console.print(Text(f"dropped: {count:,} rows: {reason}"))
    for mark in sorted({figure.mark for figure in published.values()}):
        console.print(Text(f"[{mark}] {MARKS[mark]}"))


def _print_table(console: Console, part: Table, published: Mapping[Place, Published]) -> None:
    figures = {row: figure for (name, row), figure in published.items() if name == part.name}
    beside = any(str(cells[0]) in figures for cells in part.rows)
    grid = Grid(title=Text(part.title + (" — ESTIMATED" if part.estimated else "")), title_justify="left")
    for index, column in enumerate(part.columns):
        grid.add_column(column.heading, justify="right" if index else "left")
    if beside:
        grid.add_column("published")
    for cells in part.rows[:_MOST_ROWS]:
        shown = [Text(column.shown(cell)) for column, cell in zip(part.columns, cells, strict=True)]
        grid.add_row(*shown, *([Text(str(figures.get(str(cells[0]), "")))] if beside else []))
    console.print(grid)
    notes = [f"estimated: {part.estimated}"] if part.estimated else []
    notes += [f"published: {figures['']}"] if "" in figures else []
    if len(part.rows) > _MOST_ROWS:
        notes.append(f"{len(part.rows) - _MOST_ROWS} more rows: see --json")
    for note in notes:
        console.print(Text(note))
    console.print()


@contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    """A bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(Text(printable(what)).markup, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
