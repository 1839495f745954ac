# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The vocabulary of the fleet: what a GPU offers, what a job wants, what a pair of them is worth, what a trace holds.

Standard library only. Unknown is None. Times are seconds, on the clock of their source; sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


class FleetError(Exception):
    """A command cannot go on: the message says what to do. `exit_code`: 2 wrong input, 3 something is missing."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def printable(text: str) -> str:
    """Names come from outside: a terminal escape in one is shown as text."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@dataclass(frozen=True, slots=True)
class Slot:
    """A healthy GPU that has room for one offline job."""

    node: str
    gpu: str
    """UUID"""
    model: str
    """Name of the device, as NVML gives it"""
    online: str | None
    """Kind of the online service on it; None: there is none"""
    load: float
    """Part of the time in which the online service uses the GPU, 0 to 1"""
    gap_s: float
    """Mean idle time between requests of the online service"""
    slack_s: float
    """What the online service's promise leaves over its latency alone: a kernel longer than that breaks it"""
    free_bytes: int
    spatial: float | None
    """Part of the SMs that the online service alone leaves free under MPS; None: the GPU is time-sliced"""


@dataclass(frozen=True, slots=True)
class Job:
    """An offline job that waits for one GPU."""

    key: str
    kind: str
    """Jobs of one kind behave alike"""
    memory_bytes: int
    kernel_s: float | None
    """Mean length of its kernels; None: unknown"""
    value: float = 1.0
    """What a unit of its throughput is worth"""
    remaining_s: float | None = None
    """Alone on a GPU"""


@dataclass(frozen=True, slots=True)
class Weight:
    """What is expected of a pair."""

    throughput: float
    """Of the offline job, relative to alone, 0 to 1"""
    error: float
    """Expected absolute error of `throughput`"""
    why: str
    """One clause for `explain`"""


class Predictor(Protocol):
    """Gives the weight of a pair."""

    @property
    def name(self) -> str: ...

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        """None: no pair, as it cannot run or nothing is known.

        A job that needs less memory or has shorter kernels never gets less: types of jobs rely on it.
        """


@runtime_checkable
class RowPredictor(Predictor, Protocol):
    """A predictor that is faster for many pairs at once: a plan asks for a million."""

    def rows(self, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
        """By slot, what `weight` gives for each job, without error and reason."""


def throughput_rows(predictor: Predictor, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
    """By slot, for each job, in the way that is fastest for the predictor."""
    if isinstance(predictor, RowPredictor):
        yield from predictor.rows(slots, jobs)
        return
    for slot in slots:
        weights = (predictor.weight(slot, job) for job in jobs)
        yield [None if weight is None else weight.throughput for weight in weights]


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace, as far as the trace says."""

    key: str
    submit_s: float
    gpus: float
    """Requested; under 1: a part of one"""
    duration_s: float | None
    """From start to end, all attempts"""
    start_s: float | None = None
    queue: str | None = None
    """Virtual cluster, queue or tenant"""
    kind: str | None = None
    """Model or program"""
    status: str | None = None
    """passed, killed or failed"""
    attempts: int | None = None
    servers: int | None = None
    """On which it ran"""
    online: bool | None = None
    """Whether it is a latency-critical service"""
    utilisation: float | None = None
    """Mean of its GPUs, 0 to 1"""
    resource_s: tuple[float, ...] | None = None
    """Seconds of an iteration by resource, where the trace has them (Muri)"""
    memory_bytes: int | None = None
    """Most that it uses of a GPU's memory"""

    @property
    def gpu_seconds(self) -> float | None:
        return None if self.duration_s is None else self.duration_s * self.gpus


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file held."""

    jobs: tuple[TraceJob, ...]
    """By `submit_s`"""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → rows that hold no job"""
