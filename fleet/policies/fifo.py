# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""First in, first out, without backfilling: a job that does not fit holds up all that came later.

Online services come before all else.
"""

from __future__ import annotations

from fleet.simulator.cluster import Act, Cluster
from fleet.simulator.placement import start_in_order


class Fifo:
    """In the order of submission."""

    name = "fifo"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        order = sorted(state.waiting, key=lambda job: (not job.job.online, job.number))
        return start_in_order(order, state, blocking=True)
