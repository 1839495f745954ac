# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Tiresias' discretised least attained service (NSDI'19): nothing is known of a job but the GPU time that it has held.

A job whose GPU time passes a threshold goes to the tail of the next lower queue. Higher queues come first and preempt.
Within a queue: who runs goes on; then those that wait, the longest wait first; then those that just came down. So a job
is never preempted for one of its own queue, except in the moment in which it comes down. Jobs are not promoted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from fleet.model import FleetError
from fleet.simulator.cluster import Act, Active, Cluster, Preempt, Start, Wake
from fleet.simulator.placement import rearrange

THRESHOLDS_GPU_S: Final = (3600.0,)
"""Two queues"""
_PAST: Final = 1e-6  # s after a threshold, so that rounding does not leave a job just below it


class Tiresias:
    """Queues by attained GPU time."""

    name = "tiresias"

    def __init__(self, thresholds_gpu_s: Sequence[float] = THRESHOLDS_GPU_S) -> None:
        if not thresholds_gpu_s or thresholds_gpu_s[0] <= 0 or list(thresholds_gpu_s) != sorted(set(thresholds_gpu_s)):
            raise FleetError("the thresholds of tiresias are GPU·s over 0 and ascend, such as 3250,7200")
        self._thresholds_gpu_s = list(thresholds_gpu_s)

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        jobs = [*state.running.values(), *state.waiting]
        before_s = now_s if state.previous_s is None else state.previous_s
        acts = rearrange(sorted(jobs, key=lambda job: self._key(job, now_s - before_s)), state)
        wakes = [self._crossing_s(job, now_s) for job in _running_after(jobs, acts)]
        next_s = min((at_s for at_s in wakes if at_s is not None), default=None)
        return acts if next_s is None else (*acts, Wake(next_s))

    def _key(self, job: Active, elapsed_s: float) -> tuple[int, int, float, int]:
        queue = bisect_right(self._thresholds_gpu_s, job.attained_gpu_s)
        if not job.gpus:
            return queue, 1, job.since_s, job.number
        earlier = bisect_right(self._thresholds_gpu_s, job.attained_gpu_s - elapsed_s * job.size)
        return queue, 2 if earlier < queue else 0, job.since_s, job.number

    def _crossing_s(self, job: Active, now_s: float) -> float | None:
        """When a job that runs passes its next threshold. None: it is in the lowest queue."""
        queue = bisect_right(self._thresholds_gpu_s, job.attained_gpu_s)
        if queue == len(self._thresholds_gpu_s):
            return None
        return now_s + (self._thresholds_gpu_s[queue] - job.attained_gpu_s) / job.size + _PAST


def _running_after(jobs: Sequence[Active], acts: Sequence[Act]) -> list[Active]:
    started = {act.number for act in acts if isinstance(act, Start)}
    stopped = {act.number for act in acts if isinstance(act, Preempt)}
    return [job for job in jobs if job.number in started or (job.gpus and job.number not in stopped)]
