# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last minute of figures of devices and containers, taken from each snapshot, and what changed in it.

Bounded: a minute of ticks, and no two of them closer than half a second. Where no agent explains its decisions about a
container, `observed_changes` lists what the snapshots of that minute show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, ContainerUsage, DeviceReading, DeviceUuid, EnforcementStatus, Snapshot

KEPT_NS: Final = 60 * NS_PER_SECOND
CLOSEST_NS: Final = NS_PER_SECOND // 2
LEAST_GAP_NS: Final = 3 * NS_PER_SECOND  # a point stands for so long, or for two ticks, unless another follows


@dataclass(frozen=True, slots=True)
class Moment:
    """A container at one tick, all its devices together."""

    sm_ratio: float | None
    memory_bytes: int | None
    status: EnforcementStatus | None


@dataclass(frozen=True, slots=True)
class SnapshotTick:
    """What is kept of a snapshot."""

    at_ns: int
    wall_ns: int
    interval_ns: int
    devices: Mapping[DeviceUuid, DeviceReading]
    containers: Mapping[ContainerKey, Moment]

    @classmethod
    def of(cls, snapshot: Snapshot) -> SnapshotTick:
        """Without processes, kernels and all else that no graph draws."""
        devices = {reading.device.uuid: reading for reading in snapshot.devices}
        status = snapshot.enforcement
        containers = {used.container.key: _moment(used, status.get(used.container.key)) for used in snapshot.containers}
        return cls(snapshot.at_ns, snapshot.wall_ns, snapshot.interval_ns, devices, containers)


@dataclass(frozen=True, slots=True)
class RecentSeries:
    """A figure over the minute that ends at `until_ns`: (when, how much), the oldest first."""

    points: tuple[tuple[int, float | None], ...]
    until_ns: int
    gap_ns: int

    def columns(self, width: int) -> list[float | None]:
        """The minute in so many equal parts, the mean of each. A part without a point has what was known before."""
        step = KEPT_NS / max(1, width)
        parts: list[list[float | None]] = [[] for _ in range(width)]
        for at_ns, value in self.points:
            index = width - 1 - int((self.until_ns - at_ns) // step)
            if 0 <= index < width:
                parts[index].append(value)
        return _filled([_mean(part) for part in parts], [bool(part) for part in parts], int(self.gap_ns // step))

    @property
    def most(self) -> float | None:
        """The largest that was seen."""
        return max((value for _, value in self.points if value is not None), default=None)


class SnapshotHistory:
    """Ticks are added in the order of their time; an older one begins everything again (a boot, in a recording).

    The same one again changes nothing: a snapshot is shown until there is a newer one.
    """

    def __init__(self, ticks: Iterable[SnapshotTick] = ()) -> None:
        self.ticks: deque[SnapshotTick] = deque()
        for tick in ticks:
            self._add(tick)

    def add(self, snapshot: Snapshot) -> None:
        """Takes what is drawn of it, and forgets what is more than a minute old."""
        self._add(SnapshotTick.of(snapshot))

    def copy(self) -> SnapshotHistory:
        """What is known now, for good."""
        return SnapshotHistory(self.ticks)

    def _add(self, tick: SnapshotTick) -> None:
        if self.ticks and tick.at_ns == self.ticks[-1].at_ns:
            return
        if self.ticks and tick.at_ns < self.ticks[-1].at_ns:
            self.ticks.clear()
        if len(self.ticks) > 1 and self.ticks[-1].at_ns - self.ticks[-2].at_ns < CLOSEST_NS:
            self.ticks.pop()
        self.ticks.append(tick)
        while self.ticks[0].at_ns <= tick.at_ns - KEPT_NS:
            self.ticks.popleft()

    def device(self, uuid: DeviceUuid, figure: Callable[[DeviceReading], float | None]) -> RecentSeries:
        """A figure of a device; unknown where the device was not there."""
        return self._series(lambda tick: None if (one := tick.devices.get(uuid)) is None else figure(one))

    def container(self, key: ContainerKey, figure: Callable[[Moment], float | None]) -> RecentSeries:
        """A figure of a container; unknown where the container was not there."""
        return self._series(lambda tick: None if (one := tick.containers.get(key)) is None else figure(one))

    def _series(self, figure: Callable[[SnapshotTick], float | None]) -> RecentSeries:
        if not self.ticks:
            return RecentSeries((), 0, LEAST_GAP_NS)
        last = self.ticks[-1]
        gap_ns = max(LEAST_GAP_NS, 2 * last.interval_ns)
        return RecentSeries(tuple((tick.at_ns, figure(tick)) for tick in self.ticks), last.at_ns, gap_ns)


def _moment(used: ContainerUsage, status: EnforcementStatus | None) -> Moment:
    ratios = [usage.sm_ratio for usage in used.usage if usage.sm_ratio is not None]
    sizes = [usage.memory_bytes for usage in used.usage if usage.memory_bytes is not None]
    return Moment(sum(ratios) if ratios else None, sum(sizes) if sizes else None, status)


def _mean(part: list[float | None]) -> float | None:
    known = [value for value in part if value is not None]
    return sum(known) / len(known) if known else None


def _filled(values: list[float | None], has_point: list[bool], longest: int) -> list[float | None]:
    """Each part without a point has the value before it, for `longest` parts at most."""
    filled, since = list(values), longest
    for index, known in enumerate(has_point):
        since = 0 if known else since + 1
        if not known and index and since <= longest:
            filled[index] = filled[index - 1]
    return filled


class DecisionBlock(Protocol):
    """A stretch of time: a line, and what belongs to it, label and text each."""

    @property
    def head(self) -> str: ...

    @property
    def rows(self) -> tuple[tuple[str, str], ...]: ...


AskDecisions = Callable[
    [ContainerKey], Sequence[DecisionBlock]
]  # the latest first; may wait for an answer; WardenError without one


@dataclass(frozen=True, slots=True)
class ObservedChange:
    """What snapshots have shown."""

    head: str
    rows: tuple[tuple[str, str], ...] = ()


def observed_changes(history: SnapshotHistory, key: ContainerKey) -> list[ObservedChange]:
    """A line for each change of reason or rungs in the last minute, the latest first."""
    return list(_observed_changes(history, key))[::-1]


def _observed_changes(history: SnapshotHistory, key: ContainerKey) -> Iterator[ObservedChange]:
    before: tuple[object, ...] | None = None
    for tick in history.ticks:
        moment = tick.containers.get(key)
        status = None if moment is None else moment.status
        if status is None or status.reason is None or (status.reason, status.rungs, status.troubles) == before:
            continue
        before = (status.reason, status.rungs, status.troubles)
        at = time.strftime("%H:%M:%S", time.localtime(tick.wall_ns // NS_PER_SECOND))
        yield ObservedChange(f"{at}  {_share(status)}{status.reason}", _rows(status))


def _share(status: EnforcementStatus) -> str:
    return "" if status.share_ratio is None else f"share {status.share_ratio * 100:.0f}%: "


def _rows(status: EnforcementStatus) -> tuple[tuple[str, str], ...]:
    rungs = (("by", ", ".join(status.rungs)),) if status.rungs else ()
    return (*rungs, *(("but", f"{rung}: {why}") for rung, why in status.troubles.items()))
