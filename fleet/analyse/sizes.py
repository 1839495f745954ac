# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How many jobs there are, how long they run and how much GPU time they take, all and by size (Philly's Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from fleet.analyse.tables import (
    WEEK_S,
    Absent,
    Cell,
    Column,
    Table,
    by_size,
    gpu_percent,
    percent,
    quantile,
    scaled,
    table,
    total_gpu_s,
)
from fleet.model import TraceJob

_CALENDAR_S: Final = 10 * 365 * 86400  # a clock that is ten years from 1970 counts from 1970


def whole(jobs: Sequence[TraceJob]) -> Table:
    """The trace as a whole; rows that it does not have are left out."""
    first_s, last_s = jobs[0].submit_s, jobs[-1].submit_s
    runtimes_s = _runtimes_s(jobs)
    queues = {job.queue for job in jobs if job.queue is not None}
    long = percent(sum(runtime_s > WEEK_S for runtime_s in runtimes_s), len(runtimes_s))
    rows: list[tuple[str, Cell, str]] = [
        ("jobs", len(jobs), ""),
        ("first submission", _date(first_s), ""),
        ("last submission", _date(last_s), ""),
        ("time between them", (last_s - first_s) / 86400, "days"),
        ("queues", len(queues) or None, "virtual clusters or tenants"),
        ("GPU time", scaled(total_gpu_s(jobs), 3600), "GPU hours"),
        ("runtime, median", scaled(quantile(runtimes_s, 0.5), 60), "minutes"),
        ("runtime, p90", scaled(quantile(runtimes_s, 0.9), 60), "minutes"),
        ("runtime, p99", scaled(quantile(runtimes_s, 0.99), 3600), "hours"),
        ("longer than a week", long, "% of the jobs"),
    ]
    columns = (Column("what", "what"), Column("value", "value"), Column("unit", "unit"))
    return Table("whole", "The trace", columns, tuple(row for row in rows if row[1] is not None))


def runtimes(jobs: Sequence[TraceJob]) -> Table:
    """Jobs, GPU time and runtimes by size."""
    columns = (
        Column("gpus", "GPUs"),
        Column("jobs", "jobs"),
        Column("jobs_percent", "% of jobs"),
        Column("gpu_time_percent", "% of GPU time"),
        Column("runtime_median_minutes", "median min"),
        Column("runtime_p90_minutes", "p90 min"),
        Column("runtime_p99_minutes", "p99 min"),
        Column("over_a_week_percent", "% over a week"),
    )
    total = total_gpu_s(jobs)
    rows = [_row(size, members, len(jobs), total) for size, members in by_size(jobs).items()]
    return table("sizes", "Jobs and runtimes by size (Philly's Fig. 2)", columns, rows)


def sharing(jobs: Sequence[TraceJob]) -> Table | Absent:
    """Jobs that ask for a part of a GPU, among those with one GPU or less."""
    title = "One-GPU jobs that ask for a part of a GPU"
    small = [job for job in jobs if job.gpus <= 1]
    parts = sorted(job.gpus for job in small if job.gpus < 1)
    if not parts:
        return Absent("sharing", title, "parts of GPUs")
    columns = (
        Column("gpus", "GPUs"),
        Column("jobs", "jobs"),
        Column("one_gpu_jobs_percent", "% of one-GPU jobs"),
        Column("part_median_gpus", "median part", 2),
    )
    shared: tuple[Cell, ...] = ("under 1", len(parts), percent(len(parts), len(small)), quantile(parts, 0.5))
    return table("sharing", title, columns, [shared])


def _row(size: str, jobs: Sequence[TraceJob], count: int, total: float | None) -> tuple[Cell, ...]:
    runtimes_s = _runtimes_s(jobs)
    return (
        size,
        len(jobs),
        percent(len(jobs), count),
        gpu_percent(jobs, total),
        *(scaled(quantile(runtimes_s, ratio), 60) for ratio in (0.5, 0.9, 0.99)),
        percent(sum(runtime_s > WEEK_S for runtime_s in runtimes_s), len(runtimes_s)),
    )


def _runtimes_s(jobs: Sequence[TraceJob]) -> list[float]:
    return sorted(job.duration_s for job in jobs if job.duration_s is not None)


def _date(time_s: float) -> str | None:
    """None: the trace's clock counts from its own beginning."""
    if time_s < _CALENDAR_S:
        return None
    try:
        return datetime.fromtimestamp(time_s, UTC).date().isoformat()
    except (OverflowError, ValueError, OSError):  # beyond the calendar
        return None
