# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Shortest remaining time first, and shortest remaining service first, with preemption.

On one machine SRTF has the least mean completion time there is (Schrage 1968). Service is time × GPUs: SRSF weighs a
gang by what it takes from others.
"""

from __future__ import annotations

from fleet.simulator.cluster import Act, Active, Cluster
from fleet.simulator.placement import rearrange


class Srtf:
    """The jobs that fit, shortest first, run; all others wait."""

    def __init__(self, by_gpus: bool = False) -> None:
        self._by_gpus = by_gpus
        self.name = "srsf" if by_gpus else "srtf"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        return rearrange(sorted([*state.running.values(), *state.waiting], key=self._key), state)

    def _key(self, job: Active) -> tuple[float, bool, int]:
        size = job.size if self._by_gpus else 1
        return job.remaining_s * size, not job.gpus, job.number  # of two equals the one that runs goes on
