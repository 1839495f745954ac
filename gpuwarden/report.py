# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden report`: the ledger's sums as a table, JSON or CSV.

Names come from outside: on a terminal they are shown, never obeyed. What --limit cuts is summed in a last row, so that
every report adds up to its total.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from agent.errors import UsageError
from agent.names import printable
from agent.usage.amounts import Amounts, Kind
from agent.usage.periods import period, utc
from agent.usage.reading import By, Group, Report, read
from agent.usage.tables import DEFAULT_FILE

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
    add("--since", default="24h", metavar="WHEN", help="24h, 7d, 2026-11-20T10:00 (local time) or start (%(default)s)")
    add("--until", metavar="WHEN", help="where it ends, written as --since (now)")
    add("--by", action="append", metavar="WHAT", help=f"one or more of {', '.join(By)} (container)")
    add("--sort", choices=_SORT_NAMES, default="sm", help="what comes first (%(default)s)")
    add("--limit", type=int, metavar="N", help="so many rows, the rest summed in one")
    add("--json", action="store_true", help="for programs; see docs/usage.md")
    add("--csv", action="store_true", help="for spreadsheets; the columns of --json")
    add("--usage", type=Path, default=DEFAULT_FILE, metavar="FILE", help="the ledger (%(default)s)")


def report(options: argparse.Namespace, now: datetime, out: IO[str]) -> int:
    """Reads and writes it. UsageError when the question is none, SetupError when there is nothing to read."""
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
        from agent.usage.table import show  # rich is slow to import

        show(found, columns(by), lines, rest, out)
    return 0


def columns(by: Sequence[By]) -> list[str]:
    """The fields of Group that tell rows apart, each once, the coarse before the fine."""
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
        labels["key"] = group.key if group.kind is Kind.CONTAINER else None
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
    """A name that spreadsheets do not take for a formula."""
    if not isinstance(value, str):
        return value
    shown = printable(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown
