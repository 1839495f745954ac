# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tick's samples, indexed for attribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agent.collectors.samples import (
    CountedSince,
    Delivered,
    OrdinalBusId,
    OrdinalUuid,
    Probed,
    ProcessesListed,
    ProcessMemory,
    ProcessUtilization,
    Sample,
)
from agent.core.device_ordinals import bus_place
from agent.core.errors import GoneError, SetupError
from agent.core.model import DeviceReading, DeviceUuid, ProcessId
from agent.node.procfs import Procfs

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class TickInputs:
    """`probed`: the processes that the probes see. `by_tgid`: the process that has each of NVML's pids now."""

    readings: tuple[DeviceReading, ...]
    probed: frozenset[ProcessId]
    by_tgid: dict[int, ProcessId]
    memory: dict[tuple[int, DeviceUuid], int]
    utilization: dict[tuple[int, DeviceUuid], float]
    devices_by_tgid: Mapping[int, Sequence[DeviceUuid]]  # where NVML lists it
    tgids_by_device: Mapping[DeviceUuid, Sequence[int]]
    driver_devices: dict[tuple[ProcessId, int], DeviceUuid]  # (process, ordinal) → what the driver answered it
    side_by_side: frozenset[tuple[int, DeviceUuid]] = frozenset()  # MPS clients
    counted_ns: int | None = None  # how long launches were counted for
    deliveries: Mapping[ProcessId, Sequence[Delivered]] = field(default_factory=dict)
    listing: frozenset[DeviceUuid] = frozenset()  # devices whose processes NVML lists

    @classmethod
    def of(cls, samples: Collection[Sample], proc: Procfs) -> TickInputs:
        """Sorts the samples; asks /proc only for pids that no probe knows."""
        readings, probed, memory, utilization, listed = [], set(), {}, {}, set()
        ordinals: list[OrdinalUuid | OrdinalBusId] = []
        clients: set[tuple[int, DeviceUuid]] = set()
        counted_ns = None
        for sample in samples:
            if isinstance(sample, DeviceReading):
                readings.append(sample)
            elif isinstance(sample, ProcessMemory):
                listed.add((sample.tgid, sample.device))
                if sample.is_mps:
                    clients.add((sample.tgid, sample.device))
                if sample.bytes is not None:
                    memory[sample.tgid, sample.device] = sample.bytes
            elif isinstance(sample, ProcessUtilization):
                utilization[sample.tgid, sample.device] = sample.ratio
            elif isinstance(sample, Probed):
                probed.add(sample.process)
            elif isinstance(sample, (OrdinalUuid, OrdinalBusId)):
                ordinals.append(sample)
            elif isinstance(sample, CountedSince):
                counted_ns = sample.at_ns - sample.before_ns
        devices_by_tgid = _grouped(sorted(listed))
        tgids_by_device = _grouped((device, tgid) for tgid, device in sorted(listed))
        by_tgid = _identify(devices_by_tgid, probed, proc)
        driver_devices = _driver_devices(ordinals, readings)
        deliveries = _grouped((one.process, one) for one in samples if isinstance(one, Delivered))
        listing = frozenset(sample.device for sample in samples if isinstance(sample, ProcessesListed))
        by_device = (devices_by_tgid, tgids_by_device)
        parts = (by_tgid, memory, utilization, *by_device, driver_devices, frozenset(clients), counted_ns, deliveries)
        return cls(tuple(readings), frozenset(probed), *parts, listing)

    @property
    def processes(self) -> frozenset[ProcessId]:
        """All processes of which anything was seen."""
        return self.probed | frozenset(self.by_tgid.values())

    @property
    def sm_count(self) -> int:
        """The SM count of all devices; 0 where they differ or it is unknown."""
        counts = {reading.device.sm_count for reading in self.readings}
        return (counts.pop() or 0) if len(counts) == 1 else 0

    def devices_of(self, tgid: int) -> Sequence[DeviceUuid]:
        """The devices on which NVML lists a process."""
        return self.devices_by_tgid.get(tgid, ())

    def tgids_on(self, device: DeviceUuid) -> Sequence[int]:
        """The processes that NVML lists on a device."""
        return self.tgids_by_device.get(device, ())

    def sole_on(self, device: DeviceUuid) -> ProcessId | None:
        """The only process that NVML lists on a device; None where it lists several, none, or nothing."""
        listed = self.tgids_on(device) if device in self.listing else ()
        return self.by_tgid.get(listed[0]) if len(listed) == 1 else None

    def memory_of(self, process: ProcessId, device: DeviceUuid) -> int | None:
        """NVML's bytes. They belong to the process that has the pid now, not to a dead one that had it before."""
        return self.memory.get((process.tgid, device)) if self.by_tgid.get(process.tgid) == process else None

    def utilization_of(self, process: ProcessId, device: DeviceUuid) -> float | None:
        """NVML's share of time, of the process that has the pid now, even if NVML does not list it."""
        is_current = self.by_tgid.get(process.tgid, process) == process
        return self.utilization.get((process.tgid, device)) if is_current else None


def _driver_devices(
    ordinals: Iterable[OrdinalUuid | OrdinalBusId], readings: Collection[DeviceReading]
) -> dict[tuple[ProcessId, int], DeviceUuid]:
    """By the UUID that the driver answered, else by the PCI address. Neither says which MIG instance is meant."""
    split = {reading.device.parent for reading in readings}
    devices = [reading.device for reading in readings if reading.device.uuid not in split]
    by_uuid = {bare_uuid(device.uuid): device.uuid for device in devices}
    places = {bus_place(device.pci_bus_id): device.uuid for device in devices if device.parent is None}
    by_bus, by_name = {}, {}
    for one in ordinals:
        if isinstance(one, OrdinalUuid):
            if one.uuid.hex() in by_uuid:
                by_name[one.process, one.ordinal] = by_uuid[one.uuid.hex()]
        elif (place := bus_place(one.text)) in places and place is not None:
            by_bus[one.process, one.ordinal] = places[place]
    return by_bus | by_name


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


def bare_uuid(uuid: DeviceUuid) -> str:
    """The 32 hexadecimal digits of "GPU-…" or "MIG-…"."""
    return uuid.partition("-")[2].replace("-", "").lower()


def _identify(tgids: Iterable[int], probed: set[ProcessId], proc: Procfs) -> dict[int, ProcessId]:
    """The newest process known by each pid: probes may still hold counts of a dead one whose pid is in use again."""
    known: dict[int, ProcessId] = {}
    for process in sorted(probed):
        known[process.tgid] = process
    found = {}
    for tgid in tgids:
        try:
            found[tgid] = known.get(tgid) or proc.process_id(tgid)
        except (GoneError, SetupError):
            continue  # ended since NVML listed it, or hidden from us: its memory is unattributed
    return found
