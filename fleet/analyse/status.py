# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How jobs end, by number and GPU time (Philly's Table 6), and how often they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from fleet.analyse.tables import (
    Absent,
    Cell,
    Column,
    Table,
    by_size,
    gpu_percent,
    grouped,
    percent,
    table,
    total_gpu_s,
)
from fleet.model import TraceJob

ORDER: Final = ("passed", "killed", "failed")


def endings(jobs: Sequence[TraceJob]) -> Table | Absent:
    """By status; jobs of which it is unknown do not count."""
    title = "Status by jobs and GPU time (Philly's Table 6)"
    ended = [job for job in jobs if job.status is not None]
    if not ended:
        return Absent("status", title, "status")
    columns = (
        Column("status", "status"),
        Column("jobs", "jobs"),
        Column("jobs_percent", "% of jobs"),
        Column("gpu_time_percent", "% of GPU time"),
        Column("attempts_mean", "mean attempts", 2),
    )
    found = grouped(ended, lambda job: job.status or "")
    total = total_gpu_s(ended)
    order = [*(status for status in ORDER if status in found), *sorted(set(found) - set(ORDER))]
    rows: list[tuple[Cell, ...]] = [
        (
            status,
            len(found[status]),
            percent(len(found[status]), len(ended)),
            gpu_percent(found[status], total),
            _mean_attempts(found[status]),
        )
        for status in order
    ]
    return table("status", title, columns, rows)


def attempts(jobs: Sequence[TraceJob]) -> Table | Absent:
    """Mean number of attempts and the part of the jobs with more than one, by size."""
    title = "Attempts by size"
    tried = [job for job in jobs if job.attempts is not None]
    if not tried:
        return Absent("attempts", title, "attempts")
    columns = (
        Column("gpus", "GPUs"),
        Column("jobs", "jobs"),
        Column("attempts_mean", "mean", 2),
        Column("retried_percent", "% tried again"),
        Column("attempts_most", "most"),
    )
    rows = [_attempt_row("all", tried), *(_attempt_row(size, members) for size, members in by_size(tried).items())]
    return table("attempts", title, columns, rows)


def _attempt_row(size: str, jobs: Sequence[TraceJob]) -> tuple[Cell, ...]:
    counts = [job.attempts for job in jobs if job.attempts is not None]
    again = percent(sum(count > 1 for count in counts), len(counts))
    return (size, len(counts), fmean(counts), again, max(counts))


def _mean_attempts(jobs: Sequence[TraceJob]) -> float | None:
    counts = [job.attempts for job in jobs if job.attempts is not None]
    return fmean(counts) if counts else None
