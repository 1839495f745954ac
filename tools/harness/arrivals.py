# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When the requests of a phase arrive: Poisson, or as in a recorded trace (any CSV with a column of timestamps).

Every phase of a pair has the same measured arrivals, however long it settled before: so two phases differ by what
happened to their requests, never by which requests there were.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate, cycle, islice, pairwise, takewhile
from pathlib import Path
from random import Random
from typing import Final

from agent.core.errors import SetupError

_COLUMNS: Final = ("timestamp", "arrival", "arrived", "arrival_s", "time", "start_time", "seconds", "ts")
_MOST_LINES: Final = 2_000_000


def poisson(rate_per_second: float, seconds: float, seed: int) -> list[float]:
    """Seconds since the start, ascending; the same for the same seed."""
    random, at, arrivals = Random(seed), 0.0, []
    while (at := at + random.expovariate(rate_per_second)) < seconds:
        arrivals.append(at)
    return arrivals


def read_trace(path: Path) -> list[float]:
    """Seconds since the first timestamp of a CSV, ascending. SetupError says which line is wrong.

    The column is the one called timestamp, time, arrival or the like, else the first. Numbers are seconds; dates and
    times are as in ISO 8601. Lines that begin with # are skipped.
    """
    try:
        with path.open(newline="") as file:
            lines = [(n, row) for n, row in enumerate(csv.reader(islice(file, _MOST_LINES)), 1) if _counts(row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SetupError(f"cannot read the trace {path}: {error}") from error
    column, rows = _column(lines)
    found = [_seconds(path, number, row, column) for number, row in rows]
    if len(found) < 2:
        raise SetupError(f"{path}: {len(found)} timestamps are no trace: give a CSV with one request per line")
    found.sort()
    return [at - found[0] for at in found]


def fitted(trace: Sequence[float], rate_per_second: float, seconds: float) -> list[float]:
    """The beginning of a trace, with time stretched or squeezed so that on average so many arrive per second."""
    wanted = math.ceil(rate_per_second * seconds)
    if len(trace) <= wanted or trace[wanted] <= 0:
        raise SetupError(
            f"the trace has {len(trace)} requests at {len(set(trace))} times, and {wanted + 1} are needed for "
            f"{seconds:g} s at {rate_per_second:g} a second: give a longer one, or fewer --seconds"
        )
    factor = seconds / trace[wanted]
    return [at * factor for at in trace[:wanted]]


def following(trace: Sequence[float], rate_per_second: float, seconds: float, lasting: float) -> list[float]:
    """What comes after the beginning that `fitted` takes, at the same pace and for so long; the trace goes round."""
    taken = len(fitted(trace, rate_per_second, seconds))
    factor = seconds / trace[taken]
    gaps = [(later - earlier) * factor for earlier, later in pairwise(trace)]
    return list(takewhile(lambda at: at < lasting, accumulate(cycle([*gaps[taken:], *gaps[:taken]]))))


def phase_arrivals(settling: Sequence[float], measured: Sequence[float], settle_seconds: float) -> list[float]:
    """The arrivals of one phase: those while everything settles, then those that are measured."""
    return [*(at for at in settling if at < settle_seconds), *(settle_seconds + at for at in measured)]


def write_trace(arrivals: Sequence[float], path: Path) -> None:
    """Writes arrivals in the format that the online workload reads."""
    path.write_text("".join(f"{at:.9f}\n" for at in arrivals))


def _counts(row: Sequence[str]) -> bool:
    return bool(row) and any(cell.strip() for cell in row) and not row[0].lstrip().startswith("#")


def _column(lines: list[tuple[int, list[str]]]) -> tuple[int, list[tuple[int, list[str]]]]:
    """Which column has the timestamps, and the lines without the heading."""
    if not lines:
        return 0, lines
    readable = [index for index, cell in enumerate(lines[0][1]) if _parsed(cell) is not None]
    if readable:
        return readable[0], lines
    names = [cell.strip().lower() for cell in lines[0][1]]
    return next((names.index(name) for name in _COLUMNS if name in names), 0), lines[1:]


def _seconds(path: Path, number: int, row: Sequence[str], column: int) -> float:
    cell = row[column] if column < len(row) else ""
    value = _parsed(cell)
    if value is None:
        raise SetupError(
            f"{path}:{number}: {cell!r} is no timestamp: write seconds or a date and time, one request per line"
        )
    return value


def _parsed(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        try:
            return datetime.fromisoformat(cell.strip()).timestamp()
        except ValueError:
            return None
    return value if math.isfinite(value) else None
