# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Devices by NVML, with memory and utilisation of their processes; and the device behind each ordinal of a process.

The latter is what the driver answered when the process asked it for an ordinal's UUID (cuDeviceGetUuid) or for the
ordinal at a PCI address (cuDeviceGetByPCIBusId).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.collectors.samples import (
    OrdinalBusId,
    OrdinalUuid,
    ProcessesListed,
    ProcessMemory,
    ProcessUtilization,
    Sample,
)
from agent.core.errors import NvmlError
from agent.core.model import ProcessId
from agent.nvml.client import Nvml
from agent.probes.libcuda import LibcudaProbes


class Devices:
    """Reads every device; one that is lost takes nothing from the others."""

    name = "nvml"

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def collect(self, now_ns: int) -> Iterable[Sample]:
        """Per device its reading, then its processes."""
        for device in self._nvml.devices():
            reading = self._nvml.read(device)
            yield reading
            if reading.lost:
                continue
            listed = self._nvml.processes(device)
            clients = self._nvml.mps_clients(device)
            if self._nvml.lists_processes(device):
                yield ProcessesListed(device.uuid)
            for tgid, used in listed:
                yield ProcessMemory(tgid, device.uuid, used, tgid in clients)
            for tgid, ratio in self._nvml.process_utilization(device, [tgid for tgid, _ in listed]).items():
                yield ProcessUtilization(tgid, device.uuid, ratio)
        if self._nvml.problem:  # after what is known of the devices: they are lost, and this is why
            raise NvmlError(self._nvml.problem)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Keeps nothing about processes."""


class Uuids:
    """Reads the maps `uuids` and `bus_ids`, which are LRU maps."""

    name = "uuids"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._uuids = probes.map("uuids")
        self._bus_ids = probes.map("bus_ids")

    def collect(self, now_ns: int) -> Iterable[OrdinalUuid | OrdinalBusId]:
        """All entries."""
        for key, value in self._uuids.items():
            yield OrdinalUuid(key.process.id(), key.ordinal, bytes(value.bytes))
        for key, value in self._bus_ids.items():
            yield OrdinalBusId(key.process.id(), key.ordinal, value.text.decode(errors="replace"))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Keeps nothing about processes."""
