# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the load is spread: over the hours of the day, over the queues, and over time as GPUs in use."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.analyse.tables import Absent, Cell, Column, Table, gpu_percent, grouped, percent, table, total_gpu_s
from fleet.model import TraceJob

_HOUR_S: Final = 3600
_DAY_S: Final = 86400


@dataclass(frozen=True, slots=True)
class Usage:
    """GPUs in use as a step function: `gpus[i]` from `times_s[i]` to `times_s[i + 1]`, none outside."""

    times_s: tuple[float, ...]
    gpus: tuple[float, ...]

    @property
    def peak(self) -> float:
        return max(self.gpus, default=0.0)

    def within_s(self, bound: float) -> tuple[float, ...]:
        """At each of `times_s`: the time so far during which at most `bound` GPUs were in use."""
        total, totals = 0.0, [0.0]
        for index in range(len(self.times_s) - 1):
            if self.gpus[index] <= bound:
                total += self.times_s[index + 1] - self.times_s[index]
            totals.append(total)
        return tuple(totals)

    def within_until_s(self, totals: Sequence[float], bound: float, time_s: float) -> float:
        """`within_s` at any time; nothing is in use before the first step and after the last."""
        index = bisect_right(self.times_s, time_s) - 1
        if index < 0:
            return time_s - self.times_s[0]
        return totals[index] + (time_s - self.times_s[index] if self.gpus[index] <= bound else 0.0)


def usage(jobs: Iterable[TraceJob]) -> Usage:
    """Of the jobs whose start is known; one without a known end runs on to the last time that is known."""
    started = [(job.start_s, job) for job in jobs if job.start_s is not None]
    last_s = max((start_s + (job.duration_s or 0.0) for start_s, job in started), default=0.0)
    steps: dict[float, float] = defaultdict(float)
    for start_s, job in started:
        steps[start_s] += job.gpus
        steps[last_s if job.duration_s is None else start_s + job.duration_s] -= job.gpus
    times_s, gpus, level = sorted(steps), [], 0.0
    for time_s in times_s:
        level = round(level + steps[time_s], 6)  # parts of a GPU add up to whole ones again
        gpus.append(level)
    return Usage(tuple(times_s), tuple(gpus))


def hours(jobs: Sequence[TraceJob]) -> Table:
    """The busiest hour of the day and the busiest hour and day of the trace, by submissions, beside their means."""
    columns = (
        Column("what", "busiest"),
        Column("at", "at"),
        Column("jobs", "jobs"),
        Column("to_mean_ratio", "to mean", 2),
    )
    first_s, last_s = jobs[0].submit_s, jobs[-1].submit_s
    of_day = Counter(int(job.submit_s % _DAY_S // _HOUR_S) for job in jobs)
    hour, count = of_day.most_common(1)[0]
    rows: list[tuple[Cell, ...]] = [("hour of the day", f"{hour:02}–{hour + 1:02} h", count, count / (len(jobs) / 24))]
    for what, unit_s in (("hour", _HOUR_S), ("day", _DAY_S)):
        by_time = Counter(int(job.submit_s // unit_s) for job in jobs)
        index, count = by_time.most_common(1)[0]
        units = int(last_s // unit_s) - int(first_s // unit_s) + 1
        rows.append((what, f"{what} {index - int(first_s // unit_s)}", count, count / (len(jobs) / units)))
    return table("hours", "Submissions over time, on the trace's clock", columns, rows)


def queues(jobs: Sequence[TraceJob]) -> Table | Absent:
    """Each queue's part of the jobs and of the GPU time, the largest first."""
    title = "Queues by GPU time"
    found = grouped((job for job in jobs if job.queue is not None), lambda job: job.queue or "")
    if not found:
        return Absent("queues", title, "queues")
    columns = (
        Column("queue", "queue"),
        Column("jobs", "jobs"),
        Column("jobs_percent", "% of jobs"),
        Column("gpu_time_percent", "% of GPU time"),
        Column("gpu_time_so_far_percent", "so far"),
    )
    total = total_gpu_s(jobs)
    ordered = sorted(found.items(), key=lambda item: (-(total_gpu_s(item[1]) or 0.0), item[0]))
    rows: list[tuple[Cell, ...]] = []
    so_far: list[float] = []
    for queue, members in ordered:
        part = gpu_percent(members, total)
        so_far += [] if part is None else [part]
        rows.append(
            (queue, len(members), percent(len(members), len(jobs)), part, math.fsum(so_far) if so_far else None)
        )
    return table("queues", title, columns, rows)


def in_use(jobs: Sequence[TraceJob]) -> Table | Absent:
    """GPUs in use over time: mean and most."""
    title = "GPUs in use"
    steps = usage(jobs)
    length_s = steps.times_s[-1] - steps.times_s[0] if steps.times_s else 0.0
    if not length_s:
        return Absent("in_use", title, "starts")
    gpu_s = math.fsum(
        level * (end_s - begin_s)
        for level, begin_s, end_s in zip(steps.gpus, steps.times_s, steps.times_s[1:], strict=False)
    )
    columns = (Column("what", "GPUs"), Column("mean_gpus", "mean"), Column("peak_gpus", "most"))
    return table("in_use", title, columns, [("in use", gpu_s / length_s, steps.peak)])
