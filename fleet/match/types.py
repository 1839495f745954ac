# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Slots and jobs into types, so that ten thousand of each become a hundred.

Invariant: what a type can run, each member can run; and what each member can run that its type says no to costs value,
which the certificate shows. For that a job type stands for its members by its most demanding one, and two slots are of
one type only where they have the same pairs. Workloads repeat, so this loses little: of slots it loses what they differ
by in weight, which is at most a step. Weights are looked at and not loads, as two slots with one row of weights are the
same to a plan whatever their load, memory and gaps, and two with one load may differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log
from typing import Any, Final

import numpy as np

from fleet.model import FleetError, Job, Predictor, Slot, throughput_rows

MOST_CELLS: Final = 30_000_000
"""Slots × job types: 8 bytes each"""


@dataclass(frozen=True, slots=True)
class Granularity:
    """How much two of one type may differ."""

    weight: float = 0.05
    """Step of slots' weights"""
    alike: float = 0.01
    """Types of slots whose weights agree to this are one"""
    memory_bytes: int = 2 << 30
    """Step of jobs' memory"""
    kernel_ratio: float = 1.25
    """Step of jobs' kernel lengths"""

    def halved(self) -> Granularity:
        """All steps."""
        return self._scaled(0.5)

    def doubled(self) -> Granularity:
        """All steps."""
        return self._scaled(2.0)

    def _scaled(self, factor: float) -> Granularity:
        return Granularity(
            self.weight * factor,
            self.alike * factor,
            max(1, round(self.memory_bytes * factor)),
            self.kernel_ratio**factor,
        )


@dataclass(frozen=True, slots=True)
class JobGroup:
    """Jobs of one type, by their places in the sequence of jobs."""

    members: tuple[int, ...]
    hardest: Job
    """The most memory and the longest kernels of them: what fits it fits all"""
    easiest: Job
    """The least of both: no member gets more than it in any slot"""

    @property
    def alike(self) -> bool:
        """Whether the hardest job stands for all without loss."""
        hardest, easiest = self.hardest, self.easiest
        return (hardest.memory_bytes, hardest.kernel_s) == (easiest.memory_bytes, easiest.kernel_s)


def job_key(job: Job, granularity: Granularity) -> Hashable:
    """Equal for jobs of one type."""
    kernel_step = None if job.kernel_s is None else _kernel_step(job.kernel_s, granularity)
    return job.kind, ceil(job.memory_bytes / granularity.memory_bytes), job.value, kernel_step


def _kernel_step(kernel_s: float, granularity: Granularity) -> int:
    return floor(log(max(kernel_s, 1e-9)) / log(granularity.kernel_ratio))


def job_groups(jobs: Sequence[Job], granularity: Granularity) -> list[JobGroup]:
    """In the order in which their first members wait."""
    members: dict[Hashable, list[int]] = {}
    for place, job in enumerate(jobs):
        members.setdefault(job_key(job, granularity), []).append(place)
    return [
        JobGroup(
            tuple(places), _extreme([jobs[place] for place in places], 1), _extreme([jobs[at] for at in places], -1)
        )
        for places in members.values()
    ]


def _extreme(jobs: Sequence[Job], sign: int) -> Job:
    memory_bytes = max((job.memory_bytes for job in jobs), key=lambda value: sign * value)
    kernels = [job.kernel_s for job in jobs if job.kernel_s is not None]
    kernel_s = max(kernels, key=lambda value: sign * value) if kernels else None
    return replace(jobs[0], memory_bytes=memory_bytes, kernel_s=kernel_s)


def rows(predictor: Predictor, slots: Sequence[Slot], jobs: Sequence[Job]) -> Any:
    """Array of slots × jobs: throughput, or NaN for no pair. Slots that differ in nothing but place are asked once."""
    if len(slots) * len(jobs) > MOST_CELLS:
        raise FleetError(
            f"{len(slots)} slots × {len(jobs)} types of jobs are too many for a plan: "
            "give jobs of one program one kind, and memory requests in whole GiB"
        )
    places: dict[Slot, list[int]] = {}
    for place, slot in enumerate(slots):
        places.setdefault(replace(slot, node="", gpu=""), []).append(place)
    found = np.full((len(slots), len(jobs)), np.nan)
    distinct = [slots[same[0]] for same in places.values()]
    for same, row in zip(places.values(), throughput_rows(predictor, distinct, jobs), strict=True):
        found[same] = np.array(row, dtype=float)
    return found


def slot_groups(slots: Sequence[Slot], weights: Any, granularity: Granularity) -> list[tuple[int, ...]]:
    """Places of slots by type, each type's in ascending order. `weights`: see `rows`. A slot without a pair is in none.

    First by online kind, GPU model, which jobs can run, and the least and the largest weight in steps; then types that
    have the same jobs and whose mean weights agree to `alike` are one.
    """
    runs = ~np.isnan(weights)
    jobs_that_run = np.packbits(runs, axis=1)
    least = _steps(np.where(runs, weights, np.inf).min(axis=1, initial=np.inf), granularity)
    largest = _steps(np.where(runs, weights, -np.inf).max(axis=1, initial=-np.inf), granularity)
    members: dict[Hashable, list[int]] = {}
    for place in np.flatnonzero(runs.any(axis=1)).tolist():
        slot = slots[place]
        key = (jobs_that_run[place].tobytes(), slot.online, slot.model, least[place], largest[place])
        members.setdefault(key, []).append(place)
    return _alike(list(members.values()), weights, granularity)


def _steps(values: Any, granularity: Granularity) -> list[float]:
    found: list[float] = np.floor(values / granularity.weight).tolist()
    return found


def _alike(groups: Sequence[list[int]], weights: Any, granularity: Granularity) -> list[tuple[int, ...]]:
    """Each group joins the first one before it whose weights agree with its own."""
    by_jobs: dict[bytes, list[list[int]]] = {}
    for group in groups:
        by_jobs.setdefault(np.isnan(weights[group[0]]).tobytes(), []).append(group)
    found = [joined for same_jobs in by_jobs.values() for joined in _joined(same_jobs, weights, granularity)]
    return sorted(found)


def _joined(groups: Sequence[list[int]], weights: Any, granularity: Granularity) -> list[tuple[int, ...]]:
    runs = ~np.isnan(weights[groups[0][0]])
    leaders = np.empty((len(groups), int(runs.sum())))
    found: list[list[int]] = []
    for group, mean in zip(groups, mean_weights(groups, weights)[:, runs], strict=True):
        near = np.flatnonzero((np.abs(leaders[: len(found)] - mean) <= granularity.alike).all(axis=1))
        if near.size:
            found[int(near[0])] += group
        else:
            leaders[len(found)] = mean
            found.append(list(group))
    return [tuple(sorted(group)) for group in found]


def mean_weights(groups: Sequence[Sequence[int]], weights: Any) -> Any:
    """Array of slot types × job types: the mean over the slots, NaN for no pair."""
    if not groups:
        return np.empty((0, weights.shape[1]))
    counts = np.array([len(group) for group in groups])
    members = np.concatenate([np.array(group) for group in groups])
    sums = np.add.reduceat(weights[members], np.cumsum(counts) - counts, axis=0)
    return sums / counts[:, None]


def names(slots: Sequence[Slot], group: Sequence[int]) -> tuple[str, ...]:
    """What is in a slot type, for people."""
    found: Mapping[str, None] = {_name(slots[place]): None for place in group}
    return tuple(sorted(found))


def _name(slot: Slot) -> str:
    return f"{slot.model} beside {slot.online}" if slot.online is not None else f"{slot.model}, free"
