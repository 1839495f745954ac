# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Running totals per container and device, and the last figures of containers that ended.

A container that lived between two ticks has totals like any other. After its end they stay until they were scraped: at
least `_KEPT_NS`, so that each of several scrapers gets them, and never longer than `_LONGEST_NS`. Bounded: the oldest
is dropped first, and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.attribution.split import Attribution, Work, add_rates, add_work
from agent.core.clock import NS_PER_SECOND
from agent.core.model import (
    Container,
    ContainerKey,
    ContainerUsage,
    DeviceReading,
    DeviceUuid,
    Totals,
    Unattributed,
    Usage,
)

_MOST_ENDED = 4096
_KEPT_NS = 60 * NS_PER_SECOND
_LONGEST_NS = 3600 * NS_PER_SECOND


@dataclass(slots=True)
class _Ended:
    usage: ContainerUsage
    at_ns: int
    scraped: bool = False


@dataclass(slots=True)
class RunningTotals:
    """See the module. `dropped` counts ended containers that were not scraped in time."""

    most_ended: int = _MOST_ENDED
    dropped: int = 0
    devices: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _containers: dict[ContainerKey, dict[DeviceUuid, Totals]] = field(default_factory=dict)
    _unattributed: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _ended: OrderedDict[ContainerKey, _Ended] = field(default_factory=OrderedDict)

    def add(self, container: Container, work: Work, usage: Usage, seconds: float) -> None:
        """Adds a process's tick to its container. One that ended before continues from its last totals."""
        totals = self._containers.get(container.key)
        if totals is None:
            ended = self._ended.pop(container.key, None)
            before = {one.device: one.totals for one in ended.usage.usage} if ended else {}
            totals = self._containers[container.key] = before
        totals[usage.device] = add_work(totals.get(usage.device, Totals()), usage, work, seconds)

    def of(self, container: ContainerKey) -> Mapping[DeviceUuid, Totals]:
        """A container's totals by device."""
        return self._containers.get(container, {})

    def add_unattributed(self, rest: Unattributed, seconds: float) -> Unattributed:
        """Adds a device's unattributed part; the same with its totals after this tick."""
        before = self._unattributed.get(rest.device, Totals())
        tx, rx = rest.pcie_tx_bytes_per_second, rest.pcie_rx_bytes_per_second
        totals = add_rates(before, rest.sm_ratio, tx, rx, seconds)
        self._unattributed[rest.device] = totals
        return replace(rest, totals=totals)

    def add_device(self, attribution: Attribution, kernels: int, seconds: float) -> None:
        """Adds the device's own figures."""
        reading: DeviceReading = attribution.reading
        device = reading.device.uuid
        before = self.devices.get(device, Totals())
        tx, rx = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
        after = add_rates(before, reading.sm_activity_ratio, tx, rx, seconds)
        self.devices[device] = replace(after, launches=before.launches + kernels)

    def end(self, containers: Iterable[Container], now_ns: int) -> None:
        """These containers have no process any more."""
        for container in containers:
            totals = self._containers.pop(container.key, None)
            if not totals:
                continue
            usage = tuple(_final(device, sums) for device, sums in totals.items())
            self._ended[container.key] = _Ended(ContainerUsage(container, usage, ()), now_ns)
        while len(self._ended) > self.most_ended:
            _, oldest = self._ended.popitem(last=False)
            self.dropped += not oldest.scraped

    def ended(self, now_ns: int) -> tuple[ContainerUsage, ...]:
        """The last figures of ended containers that are still kept."""
        for key, one in list(self._ended.items()):
            age = now_ns - one.at_ns
            if age > _LONGEST_NS or (one.scraped and age > _KEPT_NS):
                del self._ended[key]
                self.dropped += not one.scraped
        return tuple(one.usage for one in self._ended.values())

    def scraped(self, ended: Iterable[ContainerUsage]) -> None:
        """These figures were scraped. Called from the scraper's thread."""
        for usage in ended:
            one = self._ended.get(usage.container.key)
            if one is not None and one.usage is usage:
                one.scraped = True


def _final(device: DeviceUuid, totals: Totals) -> Usage:
    return Usage(device, None, None, None, None, None, None, totals)
