# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a simulation found: each job's course, and the figures that policies are compared by.

The time in which a job held its GPUs is its work alone, plus what sharing cost it, plus what restarts cost it. Where no
job ended a figure is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fleet.model import TraceJob


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's course."""

    job: TraceJob
    size: int
    start_s: float
    """When it first had its GPUs"""
    end_s: float
    held_s: float
    """In which it had its GPUs"""
    slowed_s: float
    """Of these, lost to sharing"""
    restarted_s: float
    """Of these, lost to restarts"""
    preemptions: int

    @property
    def jct_s(self) -> float:
        """Job completion time: from submission to end."""
        return self.end_s - self.job.submit_s

    @property
    def queueing_s(self) -> float:
        """In which it had no GPUs, before its start and after preemptions."""
        return max(0.0, self.jct_s - self.held_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trace under a policy."""

    policy: str
    gpus: int
    ended: tuple[Ended, ...]
    """By their end"""
    busy_gpu_s: float
    """GPU time in which a GPU had a tenant"""
    tenant_gpu_s: float
    """GPU time, counted once for each tenant"""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → jobs that were not simulated"""

    @property
    def makespan_s(self) -> float | None:
        """From the first submission to the last end."""
        if not self.ended:
            return None
        return self.ended[-1].end_s - min(one.job.submit_s for one in self.ended)

    @property
    def utilisation(self) -> float | None:
        """Part of the GPU time of the makespan in which a GPU had a tenant."""
        return self.busy_gpu_s / (self.gpus * self.makespan_s) if self.makespan_s else None


def mean(values: Sequence[float]) -> float | None:
    """None: there are none."""
    return math.fsum(values) / len(values) if values else None


def quantile(values: Sequence[float], part: float) -> float | None:
    """The least value that `part` of all do not exceed (nearest rank). None: there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


Figure = Callable[[Outcome], float | None]


def _of(times: Callable[[Outcome], list[float]], figure: Callable[[list[float]], float | None]) -> Figure:
    return lambda outcome: figure(times(outcome))


def _jct_s(outcome: Outcome) -> list[float]:
    return [one.jct_s for one in outcome.ended]


def _queueing_s(outcome: Outcome) -> list[float]:
    return [one.queueing_s for one in outcome.ended]


FIGURES: Final[dict[str, Figure]] = {
    "average_jct_s": _of(_jct_s, mean),
    "p50_jct_s": _of(_jct_s, lambda times: quantile(times, 0.5)),
    "p99_jct_s": _of(_jct_s, lambda times: quantile(times, 0.99)),
    "average_queueing_s": _of(_queueing_s, mean),
    "p50_queueing_s": _of(_queueing_s, lambda times: quantile(times, 0.5)),
    "p99_queueing_s": _of(_queueing_s, lambda times: quantile(times, 0.99)),
    "makespan_s": lambda outcome: outcome.makespan_s,
    "utilisation_ratio": lambda outcome: outcome.utilisation,
}
"""Name with unit → how it comes from an outcome"""


def summary(outcome: Outcome) -> dict[str, float | None]:
    """All figures."""
    return {name: figure(outcome) for name, figure in FIGURES.items()}
