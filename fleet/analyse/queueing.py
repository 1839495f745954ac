# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Delay from submission to start, by queue and size (Philly's Fig. 3), and an estimate of what jobs waited for.

The estimate takes a queue's most GPUs in use over the whole trace as its quota, as traces do not tell quotas. While a
job waits and would still fit below that, what it lacks is GPUs that lie together (fragmentation) or GPUs that others
hold beyond their own quota; while it would not, its queue has its fair share. Philly's authors had the scheduler's log
for this; here it stays a guess, and its table says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fleet.analyse.load import usage
from fleet.analyse.tables import (
    Absent,
    Cell,
    Column,
    Table,
    by_size,
    delays_s,
    grouped,
    percent,
    quantile,
    size_of,
    table,
)
from fleet.model import TraceJob

MINUTE_S = 60.0


def delays(jobs: Sequence[TraceJob]) -> Table | Absent:
    """By queue and size; a row for each size over all queues comes first."""
    title = "Queueing delay by queue and size (Philly's Fig. 3)"
    started = [job for job in jobs if job.start_s is not None]
    if not started:
        return Absent("queueing", title, "starts")
    columns = (
        Column("queue", "queue"),
        Column("gpus", "GPUs"),
        Column("jobs", "jobs"),
        Column("delay_p50_s", "p50 s"),
        Column("delay_p90_s", "p90 s"),
        Column("delay_p99_s", "p99 s"),
        Column("over_a_minute_percent", "% over 1 min"),
    )
    rows = [_delay_row("all", "all", started), *_delay_rows("all", started)]
    queues = grouped((job for job in started if job.queue is not None), lambda job: job.queue or "")
    for queue in sorted(queues, key=lambda queue: (-len(queues[queue]), queue)):
        rows += _delay_rows(queue, queues[queue])
    return table("queueing", title, columns, rows)


def _delay_rows(queue: str, jobs: Sequence[TraceJob]) -> Iterator[tuple[Cell, ...]]:
    return (_delay_row(queue, size, members) for size, members in by_size(jobs).items())


def _delay_row(queue: str, size: str, jobs: Sequence[TraceJob]) -> tuple[Cell, ...]:
    waits_s = delays_s(jobs)
    long = percent(sum(wait_s > MINUTE_S for wait_s in waits_s), len(waits_s))
    return (queue, size, len(jobs), *(quantile(waits_s, ratio) for ratio in (0.5, 0.9, 0.99)), long)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a job waited while its queue was so far below its peak that the job would have fitted, and while not."""

    job: TraceJob
    below_s: float
    at_s: float


def waits(jobs: Sequence[TraceJob]) -> Iterator[Wait]:
    """Of each job that waited, `jobs` being all of one queue."""
    steps = usage(jobs)
    for gpus, alike in grouped(jobs, lambda job: job.gpus).items():
        bound = max(0.0, steps.peak - gpus)  # a job of no length leaves no trace in the peak
        totals = steps.within_s(bound)
        for job in alike:
            if job.start_s is not None and job.start_s > job.submit_s:
                below_s = steps.within_until_s(totals, bound, job.start_s)
                below_s -= steps.within_until_s(totals, bound, job.submit_s)
                yield Wait(job, below_s, job.start_s - job.submit_s - below_s)


def causes(jobs: Sequence[TraceJob]) -> Table | Absent:
    """Hours of waiting below a queue's peak use and at it, by size. Estimated."""
    title = "Waiting by cause"
    queued = [job for job in jobs if job.queue is not None and job.start_s is not None]
    if not queued:
        return Absent("causes", title, "starts of jobs with a queue")
    found = [wait for members in grouped(queued, lambda job: job.queue).values() for wait in waits(members)]
    columns = (
        Column("gpus", "GPUs"),
        Column("jobs", "jobs that waited"),
        Column("below_peak_hours", "h below peak (fragmentation)"),
        Column("at_peak_hours", "h at peak (fair share)"),
        Column("below_peak_percent", "% below peak"),
    )
    rows = [_cause_row("all", found)] if found else []
    rows += [_cause_row(size, [wait for wait in found if size_of(wait.job) == size]) for size in by_size(queued)]
    how = "a queue's quota is taken to be the most GPUs that it had in use at any time of the trace"
    return replace(table("causes", title, columns, rows), estimated=how)


def _cause_row(size: str, found: Sequence[Wait]) -> tuple[Cell, ...]:
    below_s, at_s = math.fsum(wait.below_s for wait in found), math.fsum(wait.at_s for wait in found)
    return (size, len(found), below_s / 3600, at_s / 3600, percent(below_s, below_s + at_s))
