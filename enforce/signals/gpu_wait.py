# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpu_wait`: first launch after a drained wait → return of the next wait. Needs nothing from the workload.

Requests of all processes of a container count together. What a request waited for inside the workload, before its first
launch, is not in it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agent.model import ContainerKey, ProcessId, Snapshot
from enforce.histogram import EMPTY, Counts, difference, merge, quantile_ns
from enforce.model import Reading
from enforce.policy.model import Slo

RECENT_NS = 1_000_000_000
_DEVIATIONS = 2.0
MIN_RECENT_SAMPLES = 20

ReadHistogram = Callable[[ProcessId], Counts | None]


@dataclass(slots=True)
class _History:
    """Cumulative histograms of one container, oldest first, as far back as the window needs."""

    points: deque[tuple[int, Counts]] = field(default_factory=deque)
    ended: Counts = EMPTY  # of processes that are gone
    alive: dict[ProcessId, Counts] = field(default_factory=dict)


class GpuWait:
    """Quantiles over the SLO's window from the kernel's cumulative histograms, read once per decision."""

    name = "gpu_wait"

    def __init__(self, histogram_of: ReadHistogram) -> None:
        self._histogram_of = histogram_of
        self._histories: dict[ContainerKey, _History] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests."""
        history = self._histories.setdefault(container, _History())
        _update(history, _processes(snapshot, container), self._histogram_of)
        total = merge([history.ended, *history.alive.values()])
        history.points.append((now_ns, total))
        while len(history.points) > 2 and history.points[1][0] <= now_ns - slo.window_ns:
            history.points.popleft()
        window = difference(total, history.points[0][1])
        recent = difference(total, _at(history.points, now_ns - RECENT_NS))
        return _reading(window, recent, slo, now_ns)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for container in containers:
            self._histories.pop(container, None)


def _update(history: _History, processes: set[ProcessId], histogram_of: ReadHistogram) -> None:
    for process in [p for p in history.alive if p not in processes]:
        history.ended = merge([history.ended, history.alive.pop(process)])
    for process in processes:
        counts = histogram_of(process)
        if counts is not None:
            history.alive[process] = counts


def _processes(snapshot: Snapshot, container: ContainerKey) -> set[ProcessId]:
    return {process for row in snapshot.containers if row.container.key == container for process in row.processes}


def _at(points: Iterable[tuple[int, Counts]], at_ns: int) -> Counts:
    """The newest point that is not younger than `at_ns`, else the oldest."""
    found: Counts | None = None
    for when, counts in points:
        if found is None or when <= at_ns:
            found = counts
    return found or EMPTY


def _reading(window: Counts, recent: Counts, slo: Slo, now_ns: int) -> Reading | None:
    samples, recent_samples = sum(window), sum(recent)
    enough, enough_recent = samples >= slo.min_samples, recent_samples >= MIN_RECENT_SAMPLES
    if not enough and not enough_recent:
        return None
    return Reading(
        at_ns=now_ns,
        quantile=slo.quantile,
        latency_ns=quantile_ns(window, slo.quantile) if enough else None,
        samples=samples,
        recent_ns=quantile_ns(recent, slo.quantile) if enough_recent else None,
        recent_low_ns=quantile_ns(recent, low_quantile(slo.quantile, recent_samples)) if enough_recent else None,
        recent_samples=recent_samples,
    )


def low_quantile(quantile: float, samples: int) -> float:
    """The lower end of a quantile's confidence interval, as a quantile of the same samples (binomial, 2 sigma)."""
    return max(0.5, quantile - _DEVIATIONS * math.sqrt(quantile * (1 - quantile) / max(1, samples)))
