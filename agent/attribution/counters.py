# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From cumulative samples to the work of one tick: differences per process and device.

Keeps the previous count of everything, so its size follows the kernel's maps, which are bounded. Counts come from the
arguments of a process's calls: no more is believed than a device can do in the time, and calls that ask for what later
ticks will do. What is beyond that is cut, and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from agent.attribution.placement import NvmlListing, Place
from agent.collectors.samples import AllocationCount, CopyCount, LaunchCount, LiveByAge, Sample
from agent.core.clock import NS_PER_SECOND
from agent.core.model import DeviceUuid, ProcessId

Owner = tuple[ProcessId, DeviceUuid]
_OF_LINKS = frozenset(("device_to_host", "host_to_device", "to_peer", "from_peer"))
ResolvePlace = Callable[[ProcessId, int | None], Place | None]
_LastCounts = tuple[int, int, int, int, int]  # launches, kernels, blocks, waves, SMs of waves


@dataclass(frozen=True, slots=True)
class Rate:
    """What one device does at most, and what may be asked of it before that: the driver queues 1024 calls."""

    per_second: int
    at_once: int


KERNELS = Rate(1 << 23, 1 << 27)  # each takes a microsecond at least, eight run side by side
BLOCKS = Rate(1 << 34, 1 << 42)  # each takes a microsecond at least, 16,000 run side by side
BYTES = Rate(1 << 41, 1 << 44)  # NVLink carries a terabyte a second
MOST_LIVE_BYTES = 1 << 46  # bpf/bounds.bpf.h


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
    peer_tx_bytes: int = 0
    peer_rx_bytes: int = 0
    live_bytes: dict[str, int] | None = None  # by kind; None: no allocation was seen
    peak_bytes: int = 0
    live_by_age: tuple[int, ...] = ()
    is_new: bool = False  # NVML does not list the process there yet, or no more

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
        self.unplaced_of: set[ProcessId] = set()  # whose
        self.placed: set[Owner] = set()  # whose launches were ever counted where
        self._left: dict[tuple[ProcessId, DeviceUuid | None, Rate], float] = {}  # to be believed; not there: all
        self.implausible = 0  # increments of which not all was believed
        self.unlisted: set[Owner] = set()  # who claimed something in this tick where NVML does not list it

    def tick(
        self, samples: Iterable[Sample], resolve: ResolvePlace, interval_ns: int = NS_PER_SECOND
    ) -> dict[Owner, CountedWork]:
        """The work since the previous call, which was so long ago."""
        self._pass(interval_ns)
        self.unlisted = set()
        work: dict[Owner, CountedWork] = defaultdict(CountedWork)
        for sample in samples:
            if isinstance(sample, LaunchCount):
                self._launch(sample, resolve, work)
            elif isinstance(sample, CopyCount):
                self._copy(sample, resolve, work)
            elif isinstance(sample, AllocationCount):
                self._allocation(sample, resolve, work)
            elif isinstance(sample, LiveByAge):
                self._ages(sample, resolve, work)
        return dict(work)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone."""
        for process in processes:
            self._launches.pop(process, None)
            self._copies.pop(process, None)
        gone = set(processes)
        self.unplaced_of -= gone
        self.placed = {owner for owner in self.placed if owner[0] not in gone}
        self._left = {key: left for key, left in self._left.items() if key[0] not in gone}

    def _pass(self, interval_ns: int) -> None:
        seconds = max(0, interval_ns) / NS_PER_SECOND
        later = ((key, left + key[2].per_second * seconds) for key, left in self._left.items())
        self._left = {key: left for key, left in later if left < key[2].at_once}

    def _believed(self, process: ProcessId, device: DeviceUuid | None, new: int, rate: Rate) -> int:
        """What the device can have done of it; a sum that overflowed 64 bits is lower than before."""
        if new == 0:
            return 0
        key = (process, device, rate)
        left = self._left.get(key, rate.at_once)
        believed = max(0, min(new, int(left)))
        self._left[key] = left - believed
        self.implausible += believed != new
        return believed

    def _counted(self, process: ProcessId, place: Place, work: dict[Owner, CountedWork]) -> CountedWork | None:
        """Where a claim is counted; None: NVML does not list the process there."""
        if place.listing is NvmlListing.UNLISTED:
            self.unlisted.add((process, place.device))
            return None
        counted = work[process, place.device]
        counted.is_new = place.listing is NvmlListing.NEW
        return counted

    def _launch(self, sample: LaunchCount, resolve: ResolvePlace, work: dict[Owner, CountedWork]) -> None:
        known = self._launches[sample.process]
        key = (sample.ordinal, sample.function)
        launches, kernels, blocks, waves, wave_sms = known.get(key, (0, 0, 0, 0, 0))
        known[key] = (sample.launches, sample.kernels, sample.blocks, sample.waves, sample.wave_sms)
        new = sample.launches - launches
        if new <= 0:
            return
        place = resolve(sample.process, sample.ordinal)
        device = place.device if place is not None else None
        new_kernels = self._believed(sample.process, device, sample.kernels - kernels, KERNELS)
        if place is None:
            self.unplaced += new_kernels
            self.unplaced_of.add(sample.process)
            return
        counted = self._counted(sample.process, place, work)
        if counted is None:
            return
        new_blocks = self._believed(sample.process, device, sample.blocks - blocks, BLOCKS)
        self.placed.add((sample.process, place.device))
        one = counted.functions.setdefault(sample.function, FunctionLaunches())
        one.launches += new
        one.kernels += new_kernels
        one.blocks += new_blocks
        one.waves += max(0, min(sample.waves - waves, new_blocks))
        one.wave_sms += max(0, min(sample.wave_sms - wave_sms, new_blocks))
        one.threads_per_block = sample.threads_per_block

    def _copy(self, sample: CopyCount, resolve: ResolvePlace, work: dict[Owner, CountedWork]) -> None:
        known = self._copies[sample.process]
        key = (sample.ordinal, sample.direction)
        new = sample.bytes - known.get(key, 0)
        known[key] = sample.bytes
        place = resolve(sample.process, sample.ordinal) if new and sample.direction in _OF_LINKS else None
        counted = self._counted(sample.process, place, work) if place is not None else None
        if place is None or counted is None:
            return
        new = self._believed(sample.process, place.device, new, BYTES)
        if sample.direction == "device_to_host":
            counted.pcie_tx_bytes += new
        elif sample.direction == "host_to_device":
            counted.pcie_rx_bytes += new
        elif sample.direction == "to_peer":
            counted.peer_tx_bytes += new
        elif sample.direction == "from_peer":
            counted.peer_rx_bytes += new

    def _allocation(self, sample: AllocationCount, resolve: ResolvePlace, work: dict[Owner, CountedWork]) -> None:
        """Of a process that NVML does not list, the peak alone: others are stopped or evicted for what is live."""
        place = resolve(sample.process, sample.ordinal)
        if place is None or (place.listing is NvmlListing.UNLISTED and not any(sample.live_bytes.values())):
            return
        counted = self._counted(sample.process, place, work)
        if counted is None:
            return
        counted.peak_bytes = min(counted.peak_bytes + sample.peak_bytes, MOST_LIVE_BYTES)
        if place.listing is not NvmlListing.LISTED:
            return
        live = counted.live_bytes = counted.live_bytes or {}
        for kind, size in sample.live_bytes.items():  # below 0, as u64, while a free overtakes its allocation
            added = live.get(kind, 0) + (size if size <= MOST_LIVE_BYTES else 0)
            live[kind] = min(added, MOST_LIVE_BYTES)

    def _ages(self, sample: LiveByAge, resolve: ResolvePlace, work: dict[Owner, CountedWork]) -> None:
        place = resolve(sample.process, sample.ordinal)
        if place is None or place.listing is not NvmlListing.LISTED:
            return
        counted = work[sample.process, place.device]
        known = counted.live_by_age or (0,) * len(sample.bytes)
        counted.live_by_age = tuple(a + b for a, b in zip(known, sample.bytes, strict=True))
