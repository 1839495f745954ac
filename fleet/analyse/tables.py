# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A table of the analysis, the classes of jobs that several tables have, and the statistics that they print.

What a trace does not say is never 0: a cell is None, a column in which every cell is None is left out, and a table
whose columns a trace lacks is `Absent`, with the reason. A table's first column names the row, and what was published
is looked up by that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from fleet.model import TraceJob, printable

Cell = str | float | None
"""None: unknown"""
Key = TypeVar("Key")

SIZES: Final = ("1", "2–4", "5–8", "> 8")
"""Classes of jobs by GPUs, as in Philly's figures; a part of a GPU counts as 1"""
WEEK_S: Final = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and how its figures are printed."""

    name: str
    """Key in the JSON, with the unit"""
    heading: str
    digits: int | None = None
    """Behind the point; None: none from 100 on, one from 1 on, else two"""

    def shown(self, cell: Cell) -> str:
        """The cell as it is printed."""
        if cell is None:
            return "–"
        if isinstance(cell, str):
            return printable(cell)
        if isinstance(cell, int):
            return f"{cell:,}"
        digits = self.digits
        if digits is None:
            digits = (abs(cell) < 100) + (0 < abs(cell) < 1)
        return f"{cell:,.{digits}f}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; the first cell is the row's name."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    estimated: str = ""
    """How the figures were guessed; empty: they are counted"""


@dataclass(frozen=True, slots=True)
class Absent:
    """A table that the trace has no columns for."""

    name: str
    title: str
    lacks: str


def table(name: str, title: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> Table:
    """Without the columns that are unknown in every row."""
    whole = [tuple(row) for row in rows]
    kept = [index for index in range(len(columns)) if index == 0 or any(row[index] is not None for row in whole)]
    return Table(
        name,
        title,
        tuple(columns[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in whole),
    )


def size_of(job: TraceJob) -> str:
    """The class of `SIZES`."""
    return SIZES[(job.gpus > 1) + (job.gpus > 4) + (job.gpus > 8)]


def grouped(jobs: Iterable[TraceJob], key: Callable[[TraceJob], Key]) -> dict[Key, list[TraceJob]]:
    """The jobs by `key`, in the order in which the keys come."""
    found: dict[Key, list[TraceJob]] = {}
    for job in jobs:
        found.setdefault(key(job), []).append(job)
    return found


def by_size(jobs: Iterable[TraceJob]) -> Mapping[str, list[TraceJob]]:
    """The jobs by `SIZES`, in that order; classes without a job are left out."""
    found = grouped(jobs, size_of)
    return {size: found[size] for size in SIZES if size in found}


def quantile(ordered: Sequence[float], ratio: float) -> float | None:
    """Nearest rank: the smallest value that at least `ratio` of the values do not exceed. None: there is no value."""
    # The subtraction keeps a product such as 0.07 × 100 = 7.000000000000001 at its rank.
    return ordered[max(0, math.ceil(ratio * len(ordered) - 1e-9) - 1)] if ordered else None


def percent(part: float, whole: float) -> float | None:
    """None: the whole is 0."""
    return 100 * part / whole if whole else None


def scaled(value: float | None, unit: float) -> float | None:
    """`value` ÷ `unit`; unknown stays so."""
    return None if value is None else value / unit


def total_gpu_s(jobs: Iterable[TraceJob]) -> float | None:
    """GPU-seconds of the jobs whose duration is known; None: of none."""
    known = [job.gpu_seconds for job in jobs if job.gpu_seconds is not None]
    return math.fsum(known) if known else None


def gpu_percent(jobs: Iterable[TraceJob], whole_gpu_s: float | None) -> float | None:
    """The jobs' part of that GPU time."""
    part = total_gpu_s(jobs)
    return None if part is None or whole_gpu_s is None else percent(part, whole_gpu_s)


def delay_s(job: TraceJob) -> float | None:
    """From submission to start."""
    return None if job.start_s is None else job.start_s - job.submit_s


def delays_s(jobs: Iterable[TraceJob]) -> list[float]:
    """The known ones, ascending."""
    return sorted(delay for delay in map(delay_s, jobs) if delay is not None)
