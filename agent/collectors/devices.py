# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What NVML says: devices, and memory and utilisation of the processes on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.errors import NvmlError
from agent.model import ProcessId
from agent.nvml import Nvml
from agent.samples import ProcessMemory, ProcessUtilization, Sample


class Devices:
    """Reads every device; one that is lost hides only itself."""

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
            for tgid, used in listed:
                yield ProcessMemory(tgid, device.uuid, used, tgid in clients)
            for tgid, ratio in self._nvml.process_utilization(device, [tgid for tgid, _ in listed]).items():
                yield ProcessUtilization(tgid, device.uuid, ratio)
        if self._nvml.problem:  # after what is known of the devices: they are lost, and this is why
            raise NvmlError(self._nvml.problem)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Keeps nothing about processes."""
