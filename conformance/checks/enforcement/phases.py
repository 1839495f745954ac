# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One phase: a service, work beside it, a while to settle, and what is measured then, by what the programs say.

A process' SM time on a real GPU is not known. So the offline side counts by its steps, against those that it makes
alone, and what the online side leaves is the share of the time in which it serves no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from agent.core.errors import SetupError
from bench.enforcement.figures import nearest_rank
from conformance.checks.enforcement.throughput import per_second
from conformance.clients.online import Batch, Request, Service
from tools.harness.arrivals import phase_arrivals
from tools.harness.wait import poll

_GRACE_SECONDS: Final = 1.0  # for the last requests, with the offline side still beside
_OVERTIME_SECONDS: Final = 20.0  # for the rest, without
_BURST: Final = 50


LEAST_REQUESTS: Final = 2000  # of a p99 that is to be believed: twenty lie above it
_MORE: Final = 1.05  # arrivals are random


def few(requests: int) -> str:
    """What to say of so many requests."""
    return f"{requests:,} requests" + (
        f", too few for a p99: {LEAST_REQUESTS:,} are" if requests < LEAST_REQUESTS else ""
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Lengths of a phase's parts, in seconds."""

    settle: float
    measured: float

    @property
    def whole(self) -> float:
        """Seconds of the phase with its start and its end, roughly."""
        return self.settle + self.measured + 1.0

    def fitting(self, rate_per_second: float, longest: float) -> Times:
        """With time for LEAST_REQUESTS at this rate, or for as many as come in the longest time."""
        wanted = _MORE * LEAST_REQUESTS / rate_per_second
        return Times(self.settle, min(longest, max(self.measured, wanted)))


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase's measurements."""

    latencies_s: tuple[float, ...]  # since the moment at which each request was to arrive
    services_s: tuple[float, ...]
    busy_ratio: float  # of the time, some request was being served
    steps_per_second: float | None  # of the offline side; None: there was none
    signal_ns: float | None  # the online side's p99 as the agent's signal reads it
    overrun: bool  # the offline side was ended so that the rest could be served: latencies are lower bounds

    @property
    def telling(self) -> bool:
        """Whether it had enough requests for a p99."""
        return len(self.latencies_s) >= LEAST_REQUESTS

    def quantile_s(self, quantile: float) -> float:
        """Latency at a quantile, by the nearest rank."""
        return nearest_rank(self.latencies_s, quantile)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The same ones in each phase, in seconds since the beginning of what they are for."""

    settling: Sequence[float]
    measured: Sequence[float]


def play(
    service: Service,
    batch: Batch | None,
    arrivals: Arrivals,
    times: Times,
    read: Callable[[], float | None] = lambda: None,
    release: Callable[[], object] = lambda: None,
) -> Phase:
    """Runs it. `read`: the signal's p99 in ns, asked for once at the end; `release`: ends all throttling."""
    service.prepare()
    if batch:
        batch.prepare()
        batch.begin()
    service.begin(phase_arrivals(arrivals.settling, arrivals.measured, times.settle))
    begun_ns = time.monotonic_ns()
    from_ns, to_ns = (round(begun_ns + seconds * 1e9) for seconds in (times.settle, times.settle + times.measured))
    _sleep_until(to_ns)
    signal_ns = read()
    in_time = bool(poll(service.is_done, _GRACE_SECONDS))
    release()
    if batch:
        batch.pause()
    if not in_time and not poll(service.is_done, _OVERTIME_SECONDS):
        service.end()  # its rows are those that it has served
    measured = [one for one in service.requests() if one.arrival_s >= times.settle]
    if not measured:
        raise SetupError("no request was served in the time that was to be measured")
    return _phase(measured, batch, (from_ns, to_ns), signal_ns, overrun=not in_time)


def service_seconds(service: Service) -> float:
    """The median time that it takes for a request, one straight after another, with nothing beside."""
    service.begin([0.0] * _BURST)
    if not poll(service.is_done, _OVERTIME_SECONDS):
        raise SetupError(f"{_BURST} requests were not served within {_OVERTIME_SECONDS:g} s")
    return median(one.service_s for one in service.requests())


def alone_per_second(batch: Batch, times: Times) -> float:
    """The offline side's steps by itself."""
    batch.prepare()
    batch.begin()
    begun_ns = time.monotonic_ns()
    from_ns, to_ns = (round(begun_ns + seconds * 1e9) for seconds in (times.settle, times.settle + times.measured))
    _sleep_until(to_ns)
    batch.pause()
    return per_second(batch.points(), from_ns, to_ns)


def _phase(
    measured: Sequence[Request], batch: Batch | None, span: tuple[int, int], signal_ns: float | None, overrun: bool
) -> Phase:
    return Phase(
        tuple(one.latency_s for one in measured),
        tuple(one.service_s for one in measured),
        sum(one.service_s for one in measured) / ((span[1] - span[0]) / 1e9),
        per_second(batch.points(), *span) if batch else None,
        signal_ns,
        overrun,
    )


def _sleep_until(at_ns: int) -> None:
    time.sleep(max(0.0, (at_ns - time.monotonic_ns()) / 1e9))
