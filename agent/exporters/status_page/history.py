# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last five minutes of what the graphs show, a point a second: all that the page costs while nobody looks.

Written on the observing thread, read by whoever serves the page. Bounded by the containers and devices that there are:
1.2 kB per graph, gone with its container or device.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from agent.clock import NS_PER_SECOND
from agent.model import Snapshot

SECONDS: Final = 300
SPACING_NS: Final = 900_000_000  # a little less than a second: ticks that are a little early count too


class Measure(StrEnum):
    """What a graph is of."""

    SM = "sm"
    MEMORY = "memory"
    LATENCY = "latency"
    SHARE = "share"


class Series(NamedTuple):
    """One graph: of a device, of a container, or of a container on a device."""

    measure: Measure
    container: str = ""
    device: str = ""


Point = tuple[float, float]  # seconds before the newest one, value


class Ring:
    """`note` takes every snapshot; `points` gives what is known of one series."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._times = array("q", [0]) * SECONDS  # CLOCK_MONOTONIC; 0: none yet
        self._values: dict[Series, array[float]] = {}
        self._at = 0

    def note(self, snapshot: Snapshot) -> None:
        """One tick, unless the last point is less than a second old."""
        if snapshot.at_ns - self._times[self._at] < SPACING_NS:
            return
        here = _here(snapshot)
        with self._mutex:
            self._at = (self._at + 1) % SECONDS
            self._times[self._at] = snapshot.at_ns
            self._values = {series: values for series, values in self._values.items() if here(series)}
            for values in self._values.values():
                values[self._at] = math.nan
            for series, value in _known(snapshot):
                if here(series):
                    self._values.setdefault(series, _empty())[self._at] = value

    def points(self, series: Series) -> list[Point]:
        """The oldest first; nan where nothing was known."""
        with self._mutex:
            values = self._values.get(series)
            if values is None:
                return []
            now = self._times[self._at]
            order = (*range(self._at + 1, SECONDS), *range(self._at + 1))
            aged = [((now - at) / NS_PER_SECOND, values[slot]) for slot in order if (at := self._times[slot])]
        return [point for point in aged if point[0] <= SECONDS]

    def seconds(self) -> float:
        """How far back the graphs reach."""
        with self._mutex:
            times = [at for at in self._times if at]
        return min(SECONDS, (max(times) - min(times)) / NS_PER_SECOND) if times else 0.0


def _here(snapshot: Snapshot) -> Callable[[Series], bool]:
    """Whether what a series is of is there now."""
    containers = {"", *(used.container.key for used in snapshot.containers)}
    devices = {"", *(reading.device.uuid for reading in snapshot.devices)}
    return lambda series: series.container in containers and series.device in devices


def _known(snapshot: Snapshot) -> Iterator[tuple[Series, float]]:
    for reading in snapshot.devices:
        if reading.sm_activity_ratio is not None:
            yield Series(Measure.SM, device=reading.device.uuid), reading.sm_activity_ratio
        if reading.memory_used_ratio is not None:
            yield Series(Measure.MEMORY, device=reading.device.uuid), reading.memory_used_ratio
    for row in snapshot.containers:
        for usage in row.usage:
            if usage.sm_ratio is not None:
                yield Series(Measure.SM, row.container.key, usage.device), usage.sm_ratio
    for key, said in snapshot.enforcement.items():
        if said.latency_seconds is not None:
            yield Series(Measure.LATENCY, key), said.latency_seconds
        if said.role == "offline" and said.share_ratio is not None:
            yield Series(Measure.SHARE, key), said.share_ratio


def _empty() -> array[float]:
    return array("f", [math.nan]) * SECONDS
