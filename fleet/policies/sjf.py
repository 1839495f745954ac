# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Shortest job first, without preemption: a job that does not fit lets the next one try (backfilling)."""

from __future__ import annotations

from fleet.simulator.cluster import Act, Cluster
from fleet.simulator.placement import start_in_order


class Sjf:
    """In the order of the jobs' lengths alone."""

    name = "sjf"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        return start_in_order(sorted(state.waiting, key=lambda job: (job.remaining_s, job.number)), state)
