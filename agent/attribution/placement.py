# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which device each process means by its ordinals, and whether NVML lists it there.

What the probes count is a process's claim: a library of its own may call itself libcuda and do nothing. NVML is the
fact. A claim counts on a device only where NVML lists the process, where it did a moment ago, or while NVML cannot
say; for a newcomer, which may end before NVML is read, launches and copies count for GRACE_NS, its memory never.

The order of evidence for an ordinal: what the driver reported to the process, where NVML lists it, and only then its
environment, which a program may have changed since it was started. What was learned stays until other evidence comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from agent.attribution.inputs import TickInputs
from agent.collectors.samples import AllocationCount, CopyCount, LaunchCount, Sample
from agent.containers.gpu_processes import GpuProcess
from agent.core.clock import NS_PER_SECOND
from agent.core.device_ordinals import Ordinals, device_of
from agent.core.model import DeviceUuid, ProcessId

GRACE_NS = NS_PER_SECOND
MOST_ORDINALS = 64  # of a process; no node has more devices
MemberOf = Callable[[ProcessId], GpuProcess | None]


class NvmlListing(Enum):
    """Whether NVML lists a process on a device."""

    LISTED = "listed"  # or NVML cannot say
    NEW = "new"  # not yet or no longer, within the grace period
    UNLISTED = "unlisted"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a claim belongs."""

    device: DeviceUuid
    listing: NvmlListing


def ordinals_by_evidence(
    known: Ordinals, reported: Mapping[int, DeviceUuid], used: Collection[int], listed: Sequence[DeviceUuid]
) -> Ordinals:
    """The devices behind a process's ordinals. `known`: as assumed so far. `used`: the ordinals that it has worked on.

    What the driver reported holds. `listed`: where NVML lists the process, in the node's order. Where that shows one
    assumption to be wrong, the others came from the same environment: as many devices as there are ordinals are taken
    in order, which is how programs name them; else what NVML does not contradict stays, and a single one left fits.
    """
    assumed = dict(enumerate(known))
    refuted = any(assumed.get(ordinal) != device for ordinal, device in reported.items())
    if listed:
        refuted |= any(assumed.get(ordinal) not in listed for ordinal in used if ordinal not in reported)
    if not refuted:
        return known
    found = dict(reported)
    unknown = sorted(set(used) - found.keys())
    left = [device for device in listed if device not in found.values()]
    if len(left) != len(unknown):
        for ordinal in unknown:
            if (device := assumed.get(ordinal)) in left:
                found[ordinal] = device
                left.remove(device)
        unknown = [ordinal for ordinal in unknown if ordinal not in found]
    if len(left) == len(unknown):
        found.update(zip(unknown, left, strict=True))
    for ordinal in unknown:
        if (device := assumed.get(ordinal)) is not None and device not in found.values():
            found.setdefault(ordinal, device)
    return tuple(found.get(ordinal) for ordinal in range(max(found, default=-1) + 1))


@dataclass(slots=True)
class _Evidence:
    """What is remembered of one process."""

    assumed: Ordinals
    ordinals: Ordinals
    used: set[int] = field(default_factory=set)
    claimed_ns: dict[DeviceUuid, int] = field(default_factory=dict)  # when its first claim there came
    listed_ns: dict[DeviceUuid, int] = field(default_factory=dict)  # when NVML listed it there last

    def use(self, ordinal: int | None) -> None:
        """It worked on that one."""
        if ordinal is not None and ordinal < MOST_ORDINALS:
            self.used.add(ordinal)


@dataclass(slots=True)
class Placements:
    """The evidence of all processes that are seen."""

    _now_ns: int = 0
    _grace_ns: int = GRACE_NS
    _known: dict[ProcessId, _Evidence] = field(default_factory=dict)
    _everything: tuple[DeviceUuid, ...] = ()
    _listable: frozenset[DeviceUuid] = frozenset()
    _inputs: TickInputs | None = None

    def observe(self, samples: Iterable[Sample], inputs: TickInputs, member_of: MemberOf, interval_ns: int) -> None:
        """One tick. `member_of`: a process as the registry knows it."""
        self._now_ns += interval_ns
        self._grace_ns = max(GRACE_NS, interval_ns * 3 // 2)  # this tick and the next
        self._inputs = inputs
        self._everything = tuple(reading.device.uuid for reading in inputs.readings)
        self._listable = frozenset(device for device in self._everything if _can_list(inputs, device, member_of))
        self._known = {process: self._evidence(process, member_of(process)) for process in inputs.processes}
        for sample in samples:
            if isinstance(sample, LaunchCount | CopyCount | AllocationCount) and sample.process in self._known:
                self._known[sample.process].use(sample.ordinal)
        reported: dict[ProcessId, dict[int, DeviceUuid]] = {}
        for (process, ordinal), device in inputs.driver_devices.items():
            if ordinal < MOST_ORDINALS:
                reported.setdefault(process, {})[ordinal] = device
        for process, one in self._known.items():
            self._update(process, one, reported.get(process, {}))

    def resolve(self, process: ProcessId, ordinal: int | None) -> Place | None:
        """Where a claim of this tick belongs; None: on which device is not known."""
        one = self._known.get(process)
        ordinals = self._everything if one is None else one.ordinals
        device = device_of(ordinal, ordinals, self._listed(process))
        if device is not None:
            return Place(device, self._listing(process, device))
        if self._listed(process) or not self._everything:
            return None
        first = Place(self._everything[0], self._listing(process, self._everything[0]))
        return first if first.listing is NvmlListing.UNLISTED else None  # it sees no device: refused on any

    def ordinals(self) -> dict[ProcessId, Ordinals]:
        """Of the processes whose ordinals are not what their environment says."""
        return {process: one.ordinals for process, one in self._known.items() if one.ordinals != one.assumed}

    def _evidence(self, process: ProcessId, member: GpuProcess | None) -> _Evidence:
        assumed = self._everything if member is None else member.by_environment
        one = self._known.get(process)
        if one is None or one.assumed != assumed:  # new, or it runs another program
            return _Evidence(assumed, assumed)
        return one

    def _listed(self, process: ProcessId) -> Sequence[DeviceUuid]:
        """Where NVML lists it. A dead process is not the one that has its pid now."""
        if self._inputs is None or self._inputs.by_tgid.get(process.tgid) != process:
            return ()
        return self._inputs.devices_of(process.tgid)

    def _update(self, process: ProcessId, one: _Evidence, reported: Mapping[int, DeviceUuid]) -> None:
        one.listed_ns |= dict.fromkeys(self._listed(process), self._now_ns)
        oldest_ns = self._now_ns - self._grace_ns
        recent = [device for device in self._everything if one.listed_ns.get(device, oldest_ns - 1) >= oldest_ns]
        one.ordinals = ordinals_by_evidence(one.ordinals, reported, one.used, recent)

    def _listing(self, process: ProcessId, device: DeviceUuid) -> NvmlListing:
        if device not in self._listable or device in self._listed(process):
            return NvmlListing.LISTED
        one = self._known.get(process)
        if one is None:
            return NvmlListing.UNLISTED
        latest_ns = max(one.claimed_ns.setdefault(device, self._now_ns), one.listed_ns.get(device, 0))
        return NvmlListing.NEW if self._now_ns - latest_ns <= self._grace_ns else NvmlListing.UNLISTED


def _can_list(inputs: TickInputs, device: DeviceUuid, member_of: MemberOf) -> bool:
    """Whether NVML lists every process of a device; not where it lists an MPS server without any of its clients."""
    if device not in inputs.listing:
        return False
    listed = [inputs.by_tgid.get(tgid) for tgid in inputs.tgids_on(device)]
    if listed and not any(listed):
        return False  # no such processes here: they are numbered in another PID namespace
    members = [member for process in listed if process is not None and (member := member_of(process)) is not None]
    has_clients = any((tgid, device) in inputs.side_by_side for tgid in inputs.tgids_on(device))
    return has_clients or not any(member.is_mps_server for member in members)


def fitted(claims: Mapping[ProcessId, int], limit_bytes: int | None) -> dict[ProcessId, int]:
    """Claims cut to what they can be together: the smallest in full, the others the same (max-min fairness)."""
    if limit_bytes is None or sum(claims.values()) <= limit_bytes:
        return dict(claims)
    found: dict[ProcessId, int] = {}
    left = max(0, limit_bytes)
    order = sorted(claims, key=lambda process: (claims[process], process))
    for index, process in enumerate(order):
        found[process] = min(claims[process], left // (len(order) - index))
        left -= found[process]
    return found
