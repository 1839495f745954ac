# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""SJF-BSBF (IWQoS'24), best sharing and best fit: a job shares a GPU only where the two then end earlier on average.

No preemption. The paper's batch-size scaling is left out: what runs outside a job cannot change its batches. Notation:
A is the job that waits, B the one that runs; e is remaining time alone, ξ ≥ 1 the slowdown beside the other, ê = ξe.
"""

from __future__ import annotations

from collections.abc import Callable

from fleet.policies.ffs import share_in_order, shortest_first
from fleet.simulator.cluster import Act, Active, Cluster


def shared_mean_s(alone_s: tuple[float, float], factors: tuple[float, float]) -> float:
    """T_con: the mean completion time of A and B if both run from now on. `alone_s`: e; `factors`: ξ.

    The first to end does so at its ê; the other has by then done that time ÷ its ξ of its work, and goes on alone:
    ½e + (1 − 1/(2ξ))·ê', where the dashed figure is of the first to end, the others of the other.
    """
    (short_s, short), (long_s, long) = sorted(zip(alone_s, factors, strict=True), key=lambda job: job[0] * job[1])
    return long_s / 2 + (1 - 1 / (2 * long)) * short * short_s


def sequential_mean_s(alone_s: tuple[float, float]) -> float:
    """T_seq: the mean completion time of A and B if A starts when B ends. `alone_s`: e of A, of B."""
    waiting_s, running_s = alone_s
    return running_s + waiting_s / 2


class Bsbf:
    """Free GPUs first, then those of partners with T_con < T_seq, least T_con first.

    A service, which never ends, is no job's partner: T_seq is infinite beside it, and so is T_con.
    """

    name = "bsbf"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        return share_in_order(shortest_first(state), state, _rank(state), endless=False)


def _rank(state: Cluster) -> Callable[[Active, Active], float | None]:
    def rank(job: Active, partner: Active) -> float | None:
        factors = state.pair(job.job, partner.job)
        if factors is None:
            return None
        alone_s = job.remaining_s, partner.remaining_s
        shared_s = shared_mean_s(alone_s, factors)
        return shared_s if shared_s < sequential_mean_s(alone_s) else None

    return rank
