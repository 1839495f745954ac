# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The plan: which waiting jobs go to which slots, what that is worth, and how far from the optimum it can be.

Invariant: no slot has two jobs and no job two slots; `bound` is at least the value of any plan for these slots and jobs
under this predictor. Types make it fast and the certificate says what they cost: where that is more than `most_gap`,
all steps are halved and it is solved again, as long as the number of pairs of types stays bounded. The same input gives
the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

import numpy as np

from fleet.match.baselines import BASELINES
from fleet.match.certificate import easiest_weights, upper_bound
from fleet.match.transport import Flow, transport
from fleet.match.types import Granularity, JobGroup, job_groups, mean_weights, names, rows, slot_groups
from fleet.model import Job, Predictor, Slot, Weight, throughput_rows

_INDIFFERENT: Final = 1e-3
_MOST_DOUBLINGS: Final = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one plan."""

    granularity: Granularity = field(default_factory=Granularity)
    most_gap: float = 0.01
    """Gap to the bound at which finer types are tried"""
    least_weight_step: float = 0.003
    most_type_pairs: int = 20_000
    """Slot types × job types: a third of a second of solving; coarser types are taken where there would be more"""
    seed: int = 0
    """Of the random baseline"""


@dataclass(frozen=True, slots=True)
class SlotType:
    """Slots that are interchangeable."""

    names: tuple[str, ...]
    members: tuple[int, ...]
    """Places in `Plan.slots`"""
    weights: tuple[float | None, ...]
    """Mean throughput by job type; None: no pair"""
    price: float
    """What one more such slot would add to the value"""


@dataclass(frozen=True, slots=True)
class JobType:
    """Jobs that are interchangeable."""

    job: Job
    """The most demanding of them"""
    members: tuple[int, ...]
    """Places in `Plan.jobs`"""
    price: float
    """What one more such job would add to the value"""


@dataclass(frozen=True, slots=True)
class Placed:
    """One pair."""

    slot: Slot
    job: Job
    weight: Weight


@dataclass(frozen=True, slots=True)
class Plan:
    """What `solve` found."""

    predictor: str
    slots: tuple[Slot, ...]
    jobs: tuple[Job, ...]
    slot_types: tuple[SlotType, ...]
    job_types: tuple[JobType, ...]
    amounts: Mapping[tuple[int, int], int]
    """(slot type, job type) → pairs, only where there are any"""
    placed: tuple[Placed, ...]
    """By place of the job in the queue"""
    bound: float
    """No plan is worth more"""
    baselines: Mapping[str, float]
    """Name → value of what it would place"""
    left_out: Mapping[str, int]
    """Reason → slots or jobs that were not looked at"""
    granularity: Granularity

    @property
    def value(self) -> float:
        return sum(one.weight.throughput * one.job.value for one in self.placed)

    @property
    def throughput(self) -> float:
        """Expected, in jobs alone on a GPU."""
        return sum(one.weight.throughput for one in self.placed)

    @property
    def error(self) -> float:
        """Of `throughput`, if all pairs are wrong in one direction: errors of one kind are not independent."""
        return sum(one.weight.error for one in self.placed)

    @property
    def gap_ratio(self) -> float:
        """At most this part of the optimum is missed."""
        return max(0.0, 1 - self.value / self.bound) if self.bound > 0 else 0.0

    def gain(self, baseline: str) -> float | None:
        """Value to the baseline's. None: the baseline places nothing."""
        value = self.baselines[baseline]
        return self.value / value if value > 0 else None

    @property
    def any_order_is_as_good(self) -> bool:
        """Whether placing pods in any order on any slots gives as much: weights that only add up, or too few types."""
        return min(self.baselines.values(), default=0.0) >= self.value * (1 - _INDIFFERENT)


@dataclass(frozen=True, slots=True)
class _Problem:
    slots: Sequence[Slot]
    jobs: Sequence[Job]
    predictor: Predictor


@dataclass(frozen=True, slots=True)
class _Typed:
    """A problem in types."""

    granularity: Granularity
    jobs: Sequence[JobGroup]
    slots: Sequence[tuple[int, ...]]
    weights: Any
    """Slots × job types, for the hardest job of each"""

    @property
    def values(self) -> Any:
        return np.array([group.hardest.value for group in self.jobs])

    @property
    def demand(self) -> list[int]:
        return [len(group.members) for group in self.jobs]

    @property
    def type_pairs(self) -> int:
        return len(self.slots) * len(self.jobs)


@dataclass(frozen=True, slots=True)
class _Attempt:
    typed: _Typed
    flow: Flow
    places: tuple[tuple[int, int], ...]
    """Slot, job"""
    value: float
    bound: float


def solve(slots: Sequence[Slot], jobs: Sequence[Job], predictor: Predictor, settings: Settings | None = None) -> Plan:
    """The plan for what waits now."""
    settings = settings or Settings()
    left_out: Counter[str] = Counter()
    problem = _Problem(_distinct(slots, left_out), _usable(jobs, left_out), predictor)
    typed = _typed(problem, settings.granularity)
    for _ in range(_MOST_DOUBLINGS):
        if typed.type_pairs > settings.most_type_pairs:
            typed = _typed(problem, typed.granularity.doubled(), typed)
    best = _attempt(problem, typed)
    bound = best.bound
    while best.value < bound * (1 - settings.most_gap) and typed.granularity.weight >= 2 * settings.least_weight_step:
        typed = _typed(problem, typed.granularity.halved(), typed)
        if typed.type_pairs > settings.most_type_pairs:
            break
        attempt = _attempt(problem, typed)
        bound = min(bound, attempt.bound)  # each is a bound of the same problem
        best = max(best, attempt, key=lambda one: one.value)
    return _plan(problem, best, bound, (settings.seed, left_out))


def _distinct(slots: Sequence[Slot], left_out: Counter[str]) -> list[Slot]:
    """A UUID that two slots have is trusted for neither: a GPU must not be given twice."""
    uses = Counter(slot.gpu for slot in slots)
    found = [slot for slot in slots if uses[slot.gpu] == 1]
    if len(found) < len(slots):
        left_out["two slots with one GPU"] += len(slots) - len(found)
    return found


def _usable(jobs: Sequence[Job], left_out: Counter[str]) -> list[Job]:
    found: dict[str, Job] = {}
    for job in jobs:
        if not (isfinite(job.value) and job.value > 0):
            left_out["a job whose value is no positive number"] += 1
        elif job.key in found:
            left_out["a job that is listed twice"] += 1
        else:
            found[job.key] = job
    return list(found.values())


def _typed(problem: _Problem, granularity: Granularity, before: _Typed | None = None) -> _Typed:
    """`before`: types of the same problem; the weights are taken from there if its jobs' types are the same."""
    jobs = job_groups(problem.jobs, granularity)
    if before is not None and jobs == before.jobs:
        weights = before.weights
    else:
        weights = rows(problem.predictor, problem.slots, [group.hardest for group in jobs])
    return _Typed(granularity, jobs, slot_groups(problem.slots, weights, granularity) if jobs else [], weights)


def _attempt(problem: _Problem, typed: _Typed) -> _Attempt:
    worth = mean_weights(typed.slots, typed.weights) * typed.values
    flow = transport(worth, [len(group) for group in typed.slots], typed.demand)
    places = _places(typed, flow, worth)
    easiest = easiest_weights(problem.predictor, problem.slots, typed.jobs, typed.weights)
    bound = upper_bound(easiest * typed.values, flow.job_prices, typed.demand)
    return _Attempt(typed, flow, places, _value(problem, typed, places), bound)


def _places(typed: _Typed, flow: Flow, worth: Any) -> tuple[tuple[int, int], ...]:
    """Amounts to slots and jobs: of a type the best slots first, to the jobs that gain most; jobs as they wait."""
    by_slot_type: dict[int, list[tuple[int, int]]] = {}
    for (slot_type, job_type), amount in flow.amounts.items():
        by_slot_type.setdefault(slot_type, []).append((job_type, amount))
    waiting = [iter(group.members) for group in typed.jobs]
    mean = np.nan_to_num(typed.weights, nan=0.0).sum(axis=1)
    found = []
    for slot_type, shares in sorted(by_slot_type.items()):
        best = iter(sorted(typed.slots[slot_type], key=lambda place: (-mean[place], place)))
        for job_type, amount in sorted(shares, key=lambda share: (-worth[slot_type, share[0]], share[0])):
            found += [(next(best), next(waiting[job_type])) for _ in range(amount)]
    return tuple(sorted(found, key=lambda pair: pair[1]))


def _value(problem: _Problem, typed: _Typed, places: Sequence[tuple[int, int]]) -> float:
    """Of the jobs themselves, not of the hardest of their types."""
    columns = {place: at for at, group in enumerate(typed.jobs) if group.alike for place in group.members}
    total = 0.0
    for slot, job in places:
        if (column := columns.get(job)) is not None:
            throughput = float(typed.weights[slot, column])
        else:
            ((found,),) = throughput_rows(problem.predictor, (problem.slots[slot],), (problem.jobs[job],))
            throughput = found or 0.0
        total += throughput * problem.jobs[job].value
    return total


def _baselines(problem: _Problem, typed: _Typed, seed: int) -> dict[str, float]:
    column_of = {place: at for at, group in enumerate(typed.jobs) for place in group.members}
    columns = [column_of[place] for place in range(len(problem.jobs))]
    found = {}
    for name, baseline in BASELINES.items():
        slots = baseline(typed.weights, columns, seed)
        pairs = [(slot, job) for job, slot in enumerate(slots) if slot is not None]
        found[name] = _value(problem, typed, pairs)
    return found


def _plan(problem: _Problem, best: _Attempt, bound: float, rest: tuple[int, Counter[str]]) -> Plan:
    seed, left_out = rest
    typed, flow = best.typed, best.flow
    means = mean_weights(typed.slots, typed.weights)
    slot_types = [
        SlotType(names(problem.slots, group), group, _row(means[at]), flow.slot_prices[at])
        for at, group in enumerate(typed.slots)
    ]
    job_types = [JobType(group.hardest, group.members, flow.job_prices[at]) for at, group in enumerate(typed.jobs)]
    pairs = [(problem.slots[slot], problem.jobs[job]) for slot, job in best.places]
    weighed = [(slot, job, problem.predictor.weight(slot, job)) for slot, job in pairs]
    return Plan(
        predictor=problem.predictor.name,
        slots=tuple(problem.slots),
        jobs=tuple(problem.jobs),
        slot_types=tuple(slot_types),
        job_types=tuple(job_types),
        amounts=dict(sorted(flow.amounts.items())),
        placed=tuple(Placed(slot, job, weight) for slot, job, weight in weighed if weight is not None),
        bound=bound,
        baselines=_baselines(problem, typed, seed),
        left_out=dict(left_out),
        granularity=typed.granularity,
    )


def _row(weights: Any) -> tuple[float | None, ...]:
    return tuple(None if weight != weight else float(weight) for weight in weights.tolist())
