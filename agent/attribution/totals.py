# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Running totals per container and device, and the last figures of containers that ended.

A container that lived between two ticks has totals like any other, and they stay until somebody scraped them: at
least `_KEPT_NS`, so that every one of several scrapers comes by, and never longer than `_LONGEST_NS`. Bounded: the
oldest goes first, and is counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.attribution import Attribution, Work, add, grown
from agent.clock import NS_PER_SECOND
from agent.model import Container, ContainerKey, ContainerUsage, DeviceReading, DeviceUuid, Totals, Unattributed, Usage

_MOST_ENDED = 4096
_KEPT_NS = 60 * NS_PER_SECOND
_LONGEST_NS = 3600 * NS_PER_SECOND


@dataclass(slots=True)
class _Ended:
    usage: ContainerUsage
    at_ns: int
    scraped: bool = False


@dataclass(slots=True)
class Books:
    """See the module. `dropped` counts ended containers that nobody scraped in time."""

    most_ended: int = _MOST_ENDED
    dropped: int = 0
    devices: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _containers: dict[ContainerKey, dict[DeviceUuid, Totals]] = field(default_factory=dict)
    _rest: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _ended: OrderedDict[ContainerKey, _Ended] = field(default_factory=OrderedDict)

    def book(self, container: Container, work: Work, usage: Usage, seconds: float) -> None:
        """A process's tick goes to its container, which goes on where it ended if it did before."""
        totals = self._containers.get(container.key)
        if totals is None:
            ended = self._ended.pop(container.key, None)
            before = {one.device: one.totals for one in ended.usage.usage} if ended else {}
            totals = self._containers[container.key] = before
        totals[usage.device] = add(totals.get(usage.device, Totals()), usage, work, seconds)

    def of(self, container: ContainerKey) -> Mapping[DeviceUuid, Totals]:
        """A container's totals by device."""
        return self._containers.get(container, {})

    def rest(self, rest: Unattributed, seconds: float) -> Unattributed:
        """The same with its totals after this tick."""
        before = self._rest.get(rest.device, Totals())
        totals = grown(before, rest.sm_ratio, rest.pcie_tx_bytes_per_second, rest.pcie_rx_bytes_per_second, seconds)
        self._rest[rest.device] = totals
        return replace(rest, totals=totals)

    def count_device(self, attribution: Attribution, kernels: int, seconds: float) -> None:
        """The device's own totals."""
        reading: DeviceReading = attribution.reading
        device = reading.device.uuid
        before = self.devices.get(device, Totals())
        tx, rx = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
        after = grown(before, reading.sm_activity_ratio, tx, rx, seconds)
        self.devices[device] = replace(after, launches=before.launches + kernels)

    def end(self, containers: Iterable[Container], now_ns: int) -> None:
        """These have no process any more."""
        for container in containers:
            totals = self._containers.pop(container.key, None)
            if not totals:
                continue
            usage = tuple(_final(device, sums) for device, sums in totals.items())
            self._ended[container.key] = _Ended(ContainerUsage(container, usage, ()), now_ns)
        while len(self._ended) > self.most_ended:
            _, oldest = self._ended.popitem(last=False)
            self.dropped += not oldest.scraped

    def living(self) -> Collection[ContainerKey]:
        """Whose books are open."""
        return self._containers.keys()

    def ended(self, now_ns: int) -> tuple[ContainerUsage, ...]:
        """The last figures that are still kept."""
        for key, one in list(self._ended.items()):
            age = now_ns - one.at_ns
            if age > _LONGEST_NS or (one.scraped and age > _KEPT_NS):
                del self._ended[key]
                self.dropped += not one.scraped
        return tuple(one.usage for one in self._ended.values())

    def scraped(self, ended: Iterable[ContainerUsage]) -> None:
        """Somebody has these figures. Called from the scraper's thread."""
        for usage in ended:
            one = self._ended.get(usage.container.key)
            if one is not None and one.usage is usage:
                one.scraped = True


def _final(device: DeviceUuid, totals: Totals) -> Usage:
    return Usage(device, None, None, None, None, None, None, totals)
