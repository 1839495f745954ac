# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From cumulative samples to the work of one tick: differences per process and device.

Keeps the previous count of everything, so its size follows the kernel's maps, which are bounded. Counts come from the
arguments of a process's calls: an increment that no device can do in a tick is attributed to no process, but counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from agent.collectors.samples import AllocationCount, CopyCount, LaunchCount, LiveByAge, Sample
from agent.core.model import DeviceUuid, ProcessId

Owner = tuple[ProcessId, DeviceUuid]
_MOST_IN_A_TICK = 1 << 44  # bytes or kernels: 16 TiB is more than any link carries in seconds
ResolveDevice = Callable[[ProcessId, int | None], DeviceUuid | None]
_LastCounts = tuple[int, int, int, int, int]  # launches, kernels, blocks, waves, SMs of waves


@dataclass(slots=True)
class FunctionLaunches:
    """Launches of one function in a tick."""

    launches: int = 0
    kernels: int = 0
    blocks: int = 0
    threads_per_block: int = 0
    waves: int = 0
    wave_sms: int = 0


@dataclass(slots=True)
class CountedWork:
    """One process's counted work on one device in a tick."""

    functions: dict[int, FunctionLaunches] = field(default_factory=dict)
    pcie_tx_bytes: int = 0
    pcie_rx_bytes: int = 0
    live_bytes: dict[str, int] | None = None  # by kind; None: no allocation was seen
    peak_bytes: int = 0
    live_by_age: tuple[int, ...] = ()

    @property
    def launches(self) -> int:
        """Launch calls."""
        return sum(one.launches for one in self.functions.values())

    @property
    def kernels(self) -> int:
        """Kernels; a launch of a graph is several."""
        return sum(one.kernels for one in self.functions.values())


class CounterDeltas:
    """Turns each tick's samples into differences."""

    def __init__(self) -> None:
        self._launches: dict[ProcessId, dict[tuple[int | None, int], _LastCounts]] = defaultdict(dict)
        self._copies: dict[ProcessId, dict[tuple[int | None, str], int]] = defaultdict(dict)
        self.unplaced = 0  # launches whose device is unknown
        self.implausible = 0  # increments that no device can have done

    def tick(self, samples: Iterable[Sample], resolve: ResolveDevice) -> dict[Owner, CountedWork]:
        """The work since the previous call."""
        work: dict[Owner, CountedWork] = defaultdict(CountedWork)
        for sample in samples:
            if isinstance(sample, LaunchCount):
                self._launch(sample, resolve, work)
            elif isinstance(sample, CopyCount):
                self._copy(sample, resolve, work)
            elif isinstance(sample, AllocationCount):
                self._allocation(sample, resolve, work)
            elif isinstance(sample, LiveByAge) and (device := resolve(sample.process, sample.ordinal)) is not None:
                counted = work[sample.process, device]
                known = counted.live_by_age or (0,) * len(sample.bytes)
                counted.live_by_age = tuple(a + b for a, b in zip(known, sample.bytes, strict=True))
        return dict(work)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone."""
        for process in processes:
            self._launches.pop(process, None)
            self._copies.pop(process, None)

    def _is_plausible(self, new: int) -> bool:
        """Whether a device can have done so much; a sum that overflowed 64 bits is lower than before."""
        plausible = 0 <= new <= _MOST_IN_A_TICK
        self.implausible += not plausible
        return plausible

    def _launch(self, sample: LaunchCount, resolve: ResolveDevice, work: dict[Owner, CountedWork]) -> None:
        known = self._launches[sample.process]
        key = (sample.ordinal, sample.function)
        launches, kernels, blocks, waves, wave_sms = known.get(key, (0, 0, 0, 0, 0))
        known[key] = (sample.launches, sample.kernels, sample.blocks, sample.waves, sample.wave_sms)
        new = sample.launches - launches
        if new <= 0 or not self._is_plausible(sample.kernels - kernels):
            return
        device = resolve(sample.process, sample.ordinal)
        if device is None:
            self.unplaced += sample.kernels - kernels
            return
        one = work[sample.process, device].functions.setdefault(sample.function, FunctionLaunches())
        one.launches += new
        one.kernels += sample.kernels - kernels
        one.blocks += max(0, sample.blocks - blocks)  # a product of three arguments may wrap
        one.waves += max(0, sample.waves - waves)
        one.wave_sms += max(0, sample.wave_sms - wave_sms)
        one.threads_per_block = sample.threads_per_block

    def _copy(self, sample: CopyCount, resolve: ResolveDevice, work: dict[Owner, CountedWork]) -> None:
        known = self._copies[sample.process]
        key = (sample.ordinal, sample.direction)
        new = sample.bytes - known.get(key, 0)
        known[key] = sample.bytes
        device = resolve(sample.process, sample.ordinal) if new > 0 and self._is_plausible(new) else None
        if device is None:
            return
        counted = work[sample.process, device]
        if sample.direction == "device_to_host":
            counted.pcie_tx_bytes += new
        elif sample.direction == "host_to_device":
            counted.pcie_rx_bytes += new

    def _allocation(self, sample: AllocationCount, resolve: ResolveDevice, work: dict[Owner, CountedWork]) -> None:
        device = resolve(sample.process, sample.ordinal)
        if device is None:
            return
        counted = work[sample.process, device]
        live = counted.live_bytes = counted.live_bytes or {}
        for kind, size in sample.live_bytes.items():
            live[kind] = live.get(kind, 0) + size
        counted.peak_bytes += sample.peak_bytes
