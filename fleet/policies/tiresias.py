# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Tiresias' discretised least attained service (NSDI'19): of a job it knows nothing but the GPU time that it has held.

A job comes to the tail of the highest queue; when its GPU time passes a threshold it goes to the tail of the next lower
one. Queues are served from the highest on, each from head to tail, and those that fit run, so a higher queue preempts a
lower one. Then those of a queue that wait go behind those that run and keep their order: who runs is not preempted for
one of its own queue that could not be placed before. Jobs are not promoted again, as in Tiresias' default.

The queues are this policy's memory: an instance is for one simulation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from fleet.model import FleetError
from fleet.simulator.cluster import Act, Active, Cluster, Preempt, Start, Wake
from fleet.simulator.placement import rearrange

THRESHOLDS_GPU_S: Final = (3600.0,)
"""Two queues"""
_PAST_S: Final = 1e-6  # behind a threshold, so that rounding does not leave a job just below it


class Tiresias:
    """Queues by attained GPU time."""

    name = "tiresias"

    def __init__(self, thresholds_gpu_s: Sequence[float] = THRESHOLDS_GPU_S) -> None:
        if not thresholds_gpu_s or thresholds_gpu_s[0] <= 0 or list(thresholds_gpu_s) != sorted(set(thresholds_gpu_s)):
            raise FleetError("the thresholds of tiresias are GPU·s over 0 and ascend, such as 3250,7200")
        self._thresholds_gpu_s = tuple(thresholds_gpu_s)
        self._queues: list[list[int]] = [[] for _ in range(len(thresholds_gpu_s) + 1)]

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        jobs = {job.number: job for job in (*state.running.values(), *state.waiting)}
        self._requeue(jobs)
        acts = rearrange([jobs[number] for queue in self._queues for number in queue], state)
        runs = _running_after(jobs, acts)
        for queue in self._queues:
            queue.sort(key=lambda number: number not in runs)
        wakes = [at_s for number in runs if (at_s := self._crossing_s(jobs[number], now_s)) is not None]
        return (*acts, Wake(min(wakes))) if wakes else acts

    def _requeue(self, jobs: Mapping[int, Active]) -> None:
        """Drops those that ended, and puts those that came or passed a threshold to the tail of their queue."""
        before = {number: place for place, queue in enumerate(self._queues) for number in queue}
        self._queues = [[number for number in queue if number in jobs] for queue in self._queues]
        for number in sorted(jobs):
            queue = bisect_right(self._thresholds_gpu_s, jobs[number].attained_gpu_s)
            if before.get(number) != queue:
                if number in before:
                    self._queues[before[number]].remove(number)
                self._queues[queue].append(number)

    def _crossing_s(self, job: Active, now_s: float) -> float | None:
        """When a job that runs passes its next threshold. None: it is in the lowest queue."""
        queue = bisect_right(self._thresholds_gpu_s, job.attained_gpu_s)
        if queue == len(self._thresholds_gpu_s):
            return None
        return now_s + (self._thresholds_gpu_s[queue] - job.attained_gpu_s) / job.size + _PAST_S


def _running_after(jobs: Mapping[int, Active], acts: Sequence[Act]) -> set[int]:
    started = {act.number for act in acts if isinstance(act, Start)}
    stopped = {act.number for act in acts if isinstance(act, Preempt)}
    return {number for number, job in jobs.items() if number in started or (job.gpus and number not in stopped)}
