# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The fleet's own plan in the simulator: one-GPU offline jobs are matched to GPUs, free or with an online service.

Online services come first: they get GPUs that are free or have only an offline job, and nothing preempts them. The
offline jobs that wait are then assigned so that the sum of their expected throughputs is largest. Throughput is 1 over
the slowdown that the cluster's pairs show; a Predictor reaches this policy as `fleet.simulator.slowdown.predicted`.
Gangs of offline jobs get free GPUs only: pairing several GPUs at once is not what the plan does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from fleet.model import FleetError
from fleet.policies.ffs import share_in_order
from fleet.simulator.cluster import Act, Active, Cluster, Share, Start
from fleet.simulator.placement import Space

_NO_PAIR: Final = 0.0  # worth as much as to wait, so it takes no GPU from a pair


class Pairing:
    """Maximum expected throughput of those that wait."""

    name = "pairing"

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        acts = list(_place_services(state))
        taken = {gpu for act in acts if isinstance(act, Start | Share) for gpu in act.gpus}
        offline = [job for job in state.waiting if not job.job.online]
        space = Space((gpu for gpu in state.free() if gpu not in taken), state.gpus_per_node)
        for gang in offline:
            if gang.size > 1 and (gpus := space.take(gang.size)):
                acts.append(Start(gang.number, gpus))
                taken.update(gpus)
        slots = _slots(state, acts, taken)
        return (*acts, *_matched([job for job in offline if job.size == 1], slots, state))


def _place_services(state: Cluster) -> tuple[Act, ...]:
    def beside_offline(service: Active, partner: Active) -> float | None:
        factors = None if partner.job.online else state.pair(service.job, partner.job)
        return None if factors is None else max(factors)

    return share_in_order([job for job in state.waiting if job.job.online], state, beside_offline)


def _slots(state: Cluster, acts: Sequence[Act], taken: set[int]) -> dict[int, Active | None]:
    """GPU that can take an offline job → the service on it; None: it is free."""
    slots: dict[int, Active | None] = {gpu: None for gpu in state.free() if gpu not in taken}
    for number, gpus in state.single().items():
        if state.running[number].job.online:
            slots.update((gpu, state.running[number]) for gpu in gpus if gpu not in taken)
    waited = {job.number: job for job in state.waiting}
    for act in acts:
        if isinstance(act, Start) and waited[act.number].job.online:
            slots.update((gpu, waited[act.number]) for gpu in act.gpus)
    return slots


def _matched(jobs: Sequence[Active], slots: Mapping[int, Active | None], state: Cluster) -> list[Act]:
    """The acts of a best assignment."""
    jobs, gpus = _enough(jobs, len(slots)), sorted(slots)
    if not jobs or not gpus:
        return []
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise FleetError("the policy pairing needs scipy: pip install 'gpuwarden[fleet]'", 3) from error
    weights = [[_throughput(job, slots[gpu], state) for gpu in gpus] for job in jobs]
    rows, columns = linear_sum_assignment(weights, maximize=True)
    acts: list[Act] = []
    for row, column in zip(rows, columns, strict=True):
        if weights[row][column] > 0:
            gpu = gpus[column]
            act = Start if slots[gpu] is None else Share
            acts.append(act(jobs[row].number, (gpu,)))
    return acts


def _enough(jobs: Sequence[Active], slots: int) -> list[Active]:
    """Of jobs that behave alike the first ones, as many as there are slots: more cannot start."""
    seen: Counter[tuple[object, ...]] = Counter()
    chosen = []
    for job in jobs:
        alike = job.job.kind, job.job.memory_bytes, job.job.resource_s
        seen[alike] += 1
        if seen[alike] <= slots:
            chosen.append(job)
    return chosen


def _throughput(job: Active, service: Active | None, state: Cluster) -> float:
    factors = (1.0, 1.0) if service is None else state.pair(job.job, service.job)
    return _NO_PAIR if factors is None else 1 / factors[0]
