# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last minute, as far as it is drawn: figures of devices and containers, taken from each snapshot as it passes.

Bounded: a minute of ticks, and no two of them closer than half a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agent.clock import NS_PER_SECOND
from agent.model import ContainerKey, ContainerUsage, DeviceReading, DeviceUuid, Enforcement, Snapshot

KEPT_NS: Final = 60 * NS_PER_SECOND
CLOSEST_NS: Final = NS_PER_SECOND // 2
LEAST_GAP_NS: Final = 3 * NS_PER_SECOND  # a point stands for so long, or for two ticks, unless another follows


@dataclass(frozen=True, slots=True)
class Moment:
    """A container at one tick, all its devices together."""

    sm_ratio: float | None
    memory_bytes: int | None
    said: Enforcement | None


@dataclass(frozen=True, slots=True)
class Tick:
    """What is kept of a snapshot."""

    at_ns: int
    wall_ns: int
    interval_ns: int
    devices: Mapping[DeviceUuid, DeviceReading]
    containers: Mapping[ContainerKey, Moment]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Tick:
        """Without processes, kernels and all else that no graph draws."""
        devices = {reading.device.uuid: reading for reading in snapshot.devices}
        said = snapshot.enforcement
        containers = {used.container.key: _moment(used, said.get(used.container.key)) for used in snapshot.containers}
        return cls(snapshot.at_ns, snapshot.wall_ns, snapshot.interval_ns, devices, containers)


@dataclass(frozen=True, slots=True)
class Series:
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


class History:
    """Ticks are added in the order of their time; an older one begins everything again (a boot, in a recording).

    The same one again changes nothing: a snapshot is shown until there is a newer one.
    """

    def __init__(self, ticks: Iterable[Tick] = ()) -> None:
        self.ticks: deque[Tick] = deque()
        for tick in ticks:
            self._add(tick)

    def add(self, snapshot: Snapshot) -> None:
        """Takes what is drawn of it, and forgets what is more than a minute old."""
        self._add(Tick.of(snapshot))

    def copy(self) -> History:
        """What is known now, for good."""
        return History(self.ticks)

    def _add(self, tick: Tick) -> None:
        if self.ticks and tick.at_ns == self.ticks[-1].at_ns:
            return
        if self.ticks and tick.at_ns < self.ticks[-1].at_ns:
            self.ticks.clear()
        if len(self.ticks) > 1 and self.ticks[-1].at_ns - self.ticks[-2].at_ns < CLOSEST_NS:
            self.ticks.pop()
        self.ticks.append(tick)
        while self.ticks[0].at_ns <= tick.at_ns - KEPT_NS:
            self.ticks.popleft()

    def device(self, uuid: DeviceUuid, figure: Callable[[DeviceReading], float | None]) -> Series:
        """A figure of a device; unknown where the device was not there."""
        return self._series(lambda tick: None if (one := tick.devices.get(uuid)) is None else figure(one))

    def container(self, key: ContainerKey, figure: Callable[[Moment], float | None]) -> Series:
        """A figure of a container; unknown where the container was not there."""
        return self._series(lambda tick: None if (one := tick.containers.get(key)) is None else figure(one))

    def _series(self, figure: Callable[[Tick], float | None]) -> Series:
        if not self.ticks:
            return Series((), 0, LEAST_GAP_NS)
        last = self.ticks[-1]
        gap_ns = max(LEAST_GAP_NS, 2 * last.interval_ns)
        return Series(tuple((tick.at_ns, figure(tick)) for tick in self.ticks), last.at_ns, gap_ns)


def _moment(used: ContainerUsage, said: Enforcement | None) -> Moment:
    ratios = [usage.sm_ratio for usage in used.usage if usage.sm_ratio is not None]
    sizes = [usage.memory_bytes for usage in used.usage if usage.memory_bytes is not None]
    return Moment(sum(ratios) if ratios else None, sum(sizes) if sizes else None, said)


def _mean(part: list[float | None]) -> float | None:
    known = [value for value in part if value is not None]
    return sum(known) / len(known) if known else None


def _filled(values: list[float | None], told: list[bool], longest: int) -> list[float | None]:
    """Each part that nothing was told of has the value before it, for `longest` parts at most."""
    filled, since = list(values), longest
    for index, here in enumerate(told):
        since = 0 if here else since + 1
        if not here and index and since <= longest:
            filled[index] = filled[index - 1]
    return filled
