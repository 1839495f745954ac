# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden report`: the usage ledger's sums as a table, JSON or CSV.

Names come from outside, so that terminal escapes in them are shown as text. Times are local. Rows beyond --limit are
summed in a last row, so that every report adds up to its total.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.core.errors import UsageError
from agent.core.text import ASCII, UTF8, Glyphs, printable, size
from agent.exporters.usage.amounts import AmountKind, Amounts, local, period, utc
from agent.exporters.usage.query import By, Group, Report, read
from agent.exporters.usage.store import DEFAULT_FILE
from agent.tui import cells

SCHEMA: Final = "gpuwarden.usage/1"

_SORTS: Final[dict[str, Callable[[Amounts], float]]] = {
    "sm": lambda a: a.sm_seconds,
    "memory": lambda a: a.memory_byte_seconds,
    "pcie": lambda a: a.pcie_tx_bytes + a.pcie_rx_bytes,
    "launches": lambda a: a.launches,
}

_SORT_NAMES: Final = (*_SORTS, "name")

_COLUMNS: Final = {
    By.HOUR: ("hour",),
    By.NAMESPACE: ("namespace",),
    By.POD: ("namespace", "pod"),
    By.CONTAINER: ("namespace", "pod", "container"),
    By.IMAGE: ("image",),
    By.DEVICE: ("gpu", "device"),
}

Lines = Sequence[tuple[Group, Amounts]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden report`."""
    add = parser.add_argument
    add(
        "--since",
        default="24h",
        metavar="WHEN",
        help="begin: 24h, 7d, 2026-11-20T10:00 (local time) or start (%(default)s)",
    )
    add("--until", metavar="WHEN", help="end, written as --since (now)")
    add("--by", action="append", metavar="WHAT", help=f"group by one or more of {', '.join(By)} (container)")
    add(
        "--sort", choices=_SORT_NAMES, default="sm", help="sort by this figure, largest first, or by name (%(default)s)"
    )
    add("--limit", type=int, metavar="N", help="print N rows and the sum of the rest")
    add("--json", action="store_true", help="print JSON; see docs/usage.md")
    add("--csv", action="store_true", help="print CSV for spreadsheets, with the columns of --json")
    add("--usage", type=Path, default=DEFAULT_FILE, metavar="FILE", help="usage ledger (%(default)s)")


def act(options: argparse.Namespace) -> int:
    return report(options, datetime.now().astimezone(), sys.stdout)


def report(options: argparse.Namespace, now: datetime, out: IO[str]) -> int:
    """Reads the ledger and prints the report. UsageError: invalid options. SetupError: there is no ledger."""
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: give a number of rows from 1")
    if options.json and options.csv:
        raise UsageError("--json and --csv: give one of them")
    by = _by(options.by or ["container"])
    found = read(options.usage, *period(options.since, options.until, now), by)
    lines, rest = _cut(_sorted(found, options.sort), options.limit)
    if options.json:
        json.dump(document(found, by, lines, rest), out, indent=2)
        out.write("\n")
    elif options.csv:
        _write_csv(found, by, lines, rest, out)
    else:
        show(found, columns(by), lines, rest, out)
    return 0


def columns(by: Sequence[By]) -> list[str]:
    """The fields of Group that distinguish rows, each once, the coarse before the fine."""
    return list(dict.fromkeys(name for one in By if one in by for name in _COLUMNS[one]))


def document(found: Report, by: Sequence[By], lines: Lines, rest: Amounts | None) -> dict[str, Any]:
    """The JSON of docs/usage.md."""
    names = columns(by)
    return {
        "schema": SCHEMA,
        "since": None if found.since == 0 else utc(found.since),
        "until": utc(found.until),
        "first_hour": None if found.first is None else utc(found.first),
        "last_hour": None if found.last is None else utc(found.last),
        "by": list(by),
        "rows": [{**_labels(group, names), **_figures(amounts)} for group, amounts in lines],
        "others": None if rest is None else _figures(rest),
        "total": _figures(found.total),
        "devices": _figures(found.devices),
        "dropped_rows": found.dropped_rows,
    }


def _by(given: Sequence[str]) -> list[By]:
    words = [word.strip() for one in given for word in one.split(",")]
    wrong = [word for word in words if word not in list(By)]
    if wrong:
        raise UsageError(f"--by {printable(', '.join(wrong), 80)}: give one or more of {', '.join(By)}")
    return [By(word) for word in dict.fromkeys(words)]


def _sorted(found: Report, sort: str) -> Lines:
    def name(line: tuple[Group, Amounts]) -> tuple[str, ...]:
        group = line[0]
        return (f"{group.hour or 0:020d}", *(str(part if part is not None else "") for part in group[2:]))

    lines = sorted(found.rows.items(), key=name)
    figure = _SORTS.get(sort)
    return lines if figure is None else sorted(lines, key=lambda line: figure(line[1]), reverse=True)


def _cut(lines: Lines, limit: int | None) -> tuple[Lines, Amounts | None]:
    if limit is None or len(lines) <= limit:
        return lines, None
    rest = Amounts()
    for _, amounts in lines[limit:]:
        rest.add(amounts)
    return lines[:limit], rest


def _labels(group: Group, names: Sequence[str]) -> dict[str, Any]:
    labels: dict[str, Any] = {"kind": "all" if group.kind is None else str(group.kind)}
    for name in names:
        value = getattr(group, name)
        labels[name] = utc(value) if name == "hour" else value
    if "container" in names:
        labels["key"] = group.key if group.kind is AmountKind.CONTAINER else None
    return labels


def _figures(amounts: Amounts) -> dict[str, Any]:
    return {
        "sm_seconds": amounts.sm_seconds,
        "gib_hours": amounts.gib_hours,
        "pcie_tx_bytes": amounts.pcie_tx_bytes,
        "pcie_rx_bytes": amounts.pcie_rx_bytes,
        "launches": amounts.launches,
    }


def _write_csv(found: Report, by: Sequence[By], lines: Lines, rest: Amounts | None, out: IO[str]) -> None:
    names = columns(by)
    head = list(_labels(Group(None, hour=0), names))
    writer = csv.DictWriter(out, [*head, *_figures(found.total)], lineterminator="\n")
    writer.writeheader()
    for group, amounts in lines:
        labels = {name: _cell(value) for name, value in _labels(group, names).items()}
        writer.writerow({**labels, **_figures(amounts)})
    if rest is not None:
        writer.writerow({"kind": "others", **_figures(rest)})
    writer.writerow({"kind": "total", **_figures(found.total)})


def _cell(value: Any) -> Any:
    """A cell that spreadsheets do not interpret as a formula."""
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


_FIGURES: Final = ("SM seconds", "GPU hours", "GiB hours", "PCIe tx", "PCIe rx", "launches")
_FAR_OFF: Final = 0.01


def show(
    found: Report, names: Sequence[str], lines: Sequence[tuple[Group, Amounts]], rest: Amounts | None, out: IO[str]
) -> None:
    """Prints a table as wide as the terminal; without one there is room for long names."""
    console = Console(file=out, highlight=False, markup=False, width=None if out.isatty() else 240)
    glyphs = UTF8 if console.encoding.startswith("utf") else ASCII
    console.print(_covered(found))
    if found.first is None:
        console.print("no use was recorded in them")
        return
    table = Table(box=box.SIMPLE if not glyphs.ascii else box.ASCII, show_footer=False, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=False, overflow="fold")
    for figure in _FIGURES:
        table.add_column(figure, justify="right", no_wrap=True)
    for group, amounts in lines:
        table.add_row(*_table_labels(group, names, glyphs), *_table_figures(amounts, glyphs))
    if rest is not None:
        table.add_row("(others)", *[""] * (len(names) - 1), *_table_figures(rest, glyphs))
    table.add_section()
    table.add_row("total", *[""] * (len(names) - 1), *_table_figures(found.total, glyphs))
    console.print(table)
    for note in _notes(found):
        console.print(note)


def _covered(found: Report) -> str:
    since = "the start of the ledger" if found.since == 0 else local(found.since)
    recorded = "" if found.first is None or found.last is None else f"; recorded: {local(found.first)} to "
    recorded += "" if found.last is None else local(found.last + 3600)
    return f"whole hours from {since} to {local(found.until)}{recorded}"


def _notes(found: Report) -> list[str]:
    notes = []
    total, devices = found.total.sm_seconds, found.devices.sm_seconds
    if devices and abs(total - devices) > _FAR_OFF * devices:
        notes.append(f"the devices themselves counted {devices:,.1f} SM seconds: some readings were missing")
    if found.dropped_rows:
        notes.append(f"{found.dropped_rows} rows of the oldest hours were dropped: the ledger was full")
    return notes


def _table_labels(group: Group, names: Sequence[str], glyphs: Glyphs) -> list[Text]:
    shown = [cells.name(_text(group, name), glyphs) for name in names]
    if group.kind is AmountKind.UNATTRIBUTED:
        first = next((n for n, name in enumerate(names) if name not in ("hour", "gpu", "device")), 0)
        shown[first] = Text("(unattributed)", style="dim")
    return shown


def _text(group: Group, name: str) -> str | None:
    value = getattr(group, name)
    if name == "container" and group.kind is AmountKind.CONTAINER:
        return str(value or group.key)
    if name == "hour":
        return local(value)
    return None if value is None else str(value)


def _table_figures(amounts: Amounts, glyphs: Glyphs) -> list[str]:
    return [
        f"{amounts.sm_seconds:,.1f}",
        f"{amounts.sm_seconds / 3600:,.3f}",
        f"{amounts.gib_hours:,.3f}",
        size(amounts.pcie_tx_bytes, glyphs),
        size(amounts.pcie_rx_bytes, glyphs),
        f"{amounts.launches:,}",
    ]
