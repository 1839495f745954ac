# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last five minutes of what the graphs show, a point a second, and each series as an SVG path.

This is all that the page costs while it has no reader. Written on the observing thread, read by the threads that serve
the page. Bounded by the containers and devices that there are: 1.2 kB per graph, dropped with its container or device.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from agent.core.clock import NS_PER_SECOND
from agent.core.model import Snapshot

SECONDS: Final = 300
SPACING_NS: Final = 900_000_000  # a little less than a second: ticks that are a little early count too


class GraphMetric(StrEnum):
    """The metric that a graph shows."""

    SM = "sm"
    MEMORY = "memory"
    LATENCY = "latency"
    SHARE = "share"


class GraphSeries(NamedTuple):
    """One graph: of a device, of a container, or of a container on a device."""

    metric: GraphMetric
    container: str = ""
    device: str = ""


Point = tuple[float, float]  # seconds before the newest one, value


class Ring:
    """A ring buffer of points. `note` takes every snapshot; `points` returns those of one series."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._times = array("q", [0]) * SECONDS  # CLOCK_MONOTONIC; 0: none yet
        self._values: dict[GraphSeries, array[float]] = {}
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

    def points(self, series: GraphSeries) -> list[Point]:
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


def _here(snapshot: Snapshot) -> Callable[[GraphSeries], bool]:
    """Whether what a series is of is there now."""
    containers = {"", *(used.container.key for used in snapshot.containers)}
    devices = {"", *(reading.device.uuid for reading in snapshot.devices)}
    return lambda series: series.container in containers and series.device in devices


def _known(snapshot: Snapshot) -> Iterator[tuple[GraphSeries, float]]:
    for reading in snapshot.devices:
        if reading.sm_activity_ratio is not None:
            yield GraphSeries(GraphMetric.SM, device=reading.device.uuid), reading.sm_activity_ratio
        if reading.memory_used_ratio is not None:
            yield GraphSeries(GraphMetric.MEMORY, device=reading.device.uuid), reading.memory_used_ratio
    for row in snapshot.containers:
        for usage in row.usage:
            if usage.sm_ratio is not None:
                yield GraphSeries(GraphMetric.SM, row.container.key, usage.device), usage.sm_ratio
    for key, status in snapshot.enforcement.items():
        if status.latency_seconds is not None:
            yield GraphSeries(GraphMetric.LATENCY, key), status.latency_seconds
        if status.role == "offline" and status.share_ratio is not None:
            yield GraphSeries(GraphMetric.SHARE, key), status.share_ratio


def _empty() -> array[float]:
    return array("f", [math.nan]) * SECONDS


WIDTH: Final = 120
HEIGHT: Final = 24
SHORTEST_SECONDS: Final = 30.0  # across: fewer points than this are not stretched any more
HEADROOM: Final = 1.15  # of a scale that has no end of its own


@dataclass(frozen=True, slots=True)
class Graph:
    """`line` and `level` are SVG path data; a line that breaks off where nothing was known, a level across."""

    line: str
    level: str
    label: str  # for those who do not see it


def graph(points: Sequence[Point], label: str, top: float | None = 1.0, level: float | None = None) -> Graph | None:
    """Newest on the right. Without `top` the scale ends a little above the highest point, or the level."""
    known = [value for _, value in points if not math.isnan(value)]
    if not known:
        return None
    if top is None:
        top = max(*known, level or 0.0) * HEADROOM or 1.0
    across = max(SHORTEST_SECONDS, points[0][0])
    return Graph(_line(points, across, top), "" if level is None else f"M0 {_down(level, top)}H{WIDTH}", label)


def _line(points: Sequence[Point], across: float, top: float) -> str:
    drawn: list[str] = []
    begun = 0  # points since the line was last lifted
    for age, value in points:
        if math.isnan(value):
            begun = 0
            continue
        drawn.append(f"{'' if begun else 'M'}{_number(WIDTH * (1 - age / across))} {_down(value, top)}")
        begun += 1
    if begun == 1:  # a point of its own shows as a dot
        drawn.append("h0")
    return " ".join(drawn)


def _down(value: float, top: float) -> str:
    return _number(HEIGHT * (1 - min(1.0, max(0.0, value / top))))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
