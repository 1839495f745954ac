# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a policy sees of the simulated cluster, and what it may do.

A GPU is a number; node n holds those from n × gpus_per_node on. It has no, one or two tenants. A policy is asked at
each decision and answers with acts; they are carried out in their order, so GPUs that a Preempt frees are free for the
Start behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from fleet.model import TraceJob

MOST_TENANTS: Final = 2

Slowdown = Callable[[TraceJob, TraceJob], tuple[float, float] | None]
"""Two jobs that would share a GPU → by which factor each becomes slower, at least 1. None: no pair."""


@dataclass(frozen=True, slots=True)
class Active:
    """A job that has come and not ended."""

    number: int
    """Its place among the jobs, by submission: identifies it"""
    job: TraceJob
    size: int
    """Whole GPUs that it needs, all at once"""
    remaining_s: float
    """Alone"""
    attained_gpu_s: float
    """GPU time that it has held so far"""
    since_s: float
    """When it began to wait or to run, whichever it does now"""
    gpus: tuple[int, ...] = ()
    """Where it runs; empty: it waits"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The state at a decision."""

    tenants: tuple[tuple[int, ...], ...]
    """By GPU: numbers of the jobs on it"""
    waiting: tuple[Active, ...]
    """By submission"""
    running: Mapping[int, Active]
    """By number"""
    gpus_per_node: int
    slowdown: Slowdown
    memory_bytes: int | None = None
    """Of a GPU; None: unknown, so all fits"""

    def free(self) -> list[int]:
        """GPUs without a tenant."""
        return [gpu for gpu, tenants in enumerate(self.tenants) if not tenants]

    def single(self) -> dict[int, list[int]]:
        """Job's number → GPUs of which it is the only tenant."""
        found: dict[int, list[int]] = {}
        for gpu, tenants in enumerate(self.tenants):
            if len(tenants) == 1:
                found.setdefault(tenants[0], []).append(gpu)
        return found

    def pair(self, one: TraceJob, other: TraceJob) -> tuple[float, float] | None:
        """Their slowdowns beside each other; None: they must not share a GPU."""
        known = one.memory_bytes is not None and other.memory_bytes is not None and self.memory_bytes is not None
        if known and (one.memory_bytes or 0) + (other.memory_bytes or 0) > (self.memory_bytes or 0):
            return None
        return self.slowdown(one, other)


@dataclass(frozen=True, slots=True)
class Start:
    """The job gets GPUs that have no tenant."""

    number: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """The job gets GPUs of which at least one has another tenant."""

    number: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preempt:
    """The job loses its GPUs, keeps its progress, waits, and pays the restart cost when it runs again."""

    number: int


@dataclass(frozen=True, slots=True)
class Wake:
    """The policy wants to be asked at that time, though no job may have come or ended by then."""

    at_s: float


Act = Start | Share | Preempt | Wake


class Policy(Protocol):
    """Decides which job runs where."""

    @property
    def name(self) -> str: ...

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        """Is asked whenever jobs came or ended, or, with an interval, at the next multiple of it."""
