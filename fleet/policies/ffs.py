# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Shortest job first with first-fit sharing (SJF-FFS, the baseline of SJF-BSBF, IWQoS'24): free GPUs first, then those
with one tenant, in the order of their numbers, whatever that costs. No preemption.

`share_in_order` is the skeleton of every policy that shares: what differs is how a partner ranks, and which is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.simulator.cluster import Act, Active, Cluster, Share, Start
from fleet.simulator.placement import pick

Rank = Callable[[Active, Active], float | None]
"""The job that waits, the one that would be its partner → its rank, lower is better and at least 0; None: refused"""
_FREE: Final = -1.0


@dataclass(frozen=True, slots=True)
class _Room:
    """GPUs that can still take a job in this decision."""

    free: frozenset[int]
    single: Mapping[int, Sequence[int]]
    """Job's number → GPUs of which it is the only tenant"""

    def without(self, number: int, gpus: tuple[int, ...]) -> _Room:
        """After a job got these GPUs: of those that were free it is now the only tenant."""
        left = {tenant: [gpu for gpu in own if gpu not in gpus] for tenant, own in self.single.items()}
        left[number] = [gpu for gpu in gpus if gpu in self.free]
        return _Room(self.free.difference(gpus), {tenant: own for tenant, own in left.items() if own})


def share_in_order(jobs: Iterable[Active], state: Cluster, rank: Rank, endless: bool = True) -> tuple[Act, ...]:
    """Each job in turn takes free GPUs if they are enough, else these and the best of the GPUs with one tenant.

    `endless`: a service that never ends can be a partner.
    """
    known = dict(state.running)
    single = {
        number: gpus for number, gpus in state.single().items() if endless or known[number].remaining_s < math.inf
    }
    room = _Room(frozenset(state.free()), single)
    acts: list[Act] = []
    for job in jobs:
        if not room.free and not room.single:
            break
        if gpus := pick(job.size, dict.fromkeys(room.free, _FREE), state.gpus_per_node):
            acts.append(Start(job.number, gpus))
        elif gpus := _with_partners(job, state, room, known, rank):
            acts.append(Share(job.number, gpus))
        else:
            continue
        known[job.number] = job
        room = room.without(job.number, gpus)
    return tuple(acts)


def _with_partners(
    job: Active, state: Cluster, room: _Room, known: Mapping[int, Active], rank: Rank
) -> tuple[int, ...] | None:
    if len(room.free) + sum(map(len, room.single.values())) < job.size:
        return None
    ranks = dict.fromkeys(room.free, _FREE)
    for number, gpus in room.single.items():
        partner = known[number]
        if state.pair(job.job, partner.job) is not None and (found := rank(job, partner)) is not None:
            ranks.update(dict.fromkeys(gpus, found))
    return pick(job.size, ranks, state.gpus_per_node)


def shortest_first(state: Cluster) -> list[Active]:
    """Who waits, services before jobs, then by remaining time."""
    return sorted(state.waiting, key=lambda job: (not job.job.online, job.remaining_s, job.number))


class Ffs:
    """First fit: all partners are alike."""

    name = "ffs"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        return share_in_order(shortest_first(state), state, lambda job, partner: 0.0)
