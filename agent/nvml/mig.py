# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MIG: the instances that a GPU is split into, each a device of its own.

An instance has SMs, memory and processes; power, clocks, temperature, PCIe and XIDs are its GPU's, which in turn has no
SM activity and memory of its own. NVML may give the handle of an instance that is gone to another one, so an instance
checks its UUID before each reading, and the layout is scanned again every few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import Device, DeviceReading, DeviceUuid
from agent.nvml.calls import Calls, DeviceLostError
from agent.nvml.device import Gpu, as_text
from agent.nvml.gpm import Gpm, GpmReading
from agent.nvml.pcie import PcieThroughput

WALK_EVERY_NS: Final = 3 * NS_PER_SECOND  # up to 15 calls for each GPU in MIG mode
MIB: Final = 1 << 20
_PROFILE: Final = re.compile(r" MIG (\d\S*)$")


class Instance(Gpu):
    """State that readings of one instance need between ticks."""

    reports_xids: ClassVar[bool] = False

    def __init__(self, calls: Calls, device: Device, handle: Any, gpu: Gpu, gpm_instance: int | None) -> None:
        super().__init__(calls, device, handle)
        self._gpu = gpu
        self._gpm = Gpm(calls, device.uuid, gpm_instance)
        self._has_gpm = gpm_instance is not None

    def find(self) -> bool:
        """Look for the instance by its UUID; False while its GPU is lost, or once a reconfiguration removed it."""
        return not self._gpu.lost and super().find()

    def read(self, throughput: PcieThroughput, now_ns: int, wall_us: int) -> DeviceReading:
        """One tick of this instance. Raises DeviceLostError (also when it is gone) or NvmlDownError."""
        self._require_same_uuid()
        gpm = self._read_gpm(now_ns)
        activity = None if gpm is None else gpm.sm_activity_ratio
        used, reserved = self._memory()
        return DeviceReading(
            device=self.device,
            sm_activity_ratio=activity,
            sm_activity_source=None if activity is None else "gpm",
            memory_used_bytes=used,
            memory_reserved_bytes=reserved,
        )

    def process_utilization(self, listed: Collection[int], wall_us: int) -> dict[int, float]:
        """Unknown: NVML has it for whole GPUs only."""
        return {}

    def _require_same_uuid(self) -> None:
        uuid = as_text(self._calls.try_call(self.device.uuid, "nvmlDeviceGetUUID", self.handle))
        if self._gpu.lost or uuid != self.device.uuid:
            raise DeviceLostError("nvmlDeviceGetUUID")

    def _read_gpm(self, now_ns: int) -> GpmReading | None:
        return self._gpm.read(self._gpu.handle, now_ns) if self._has_gpm else None


class Split:
    """The instances of one GPU, as they were at the last walk."""

    def __init__(self, calls: Calls, gpu: Gpu) -> None:
        self._calls, self._gpu = calls, gpu
        self._instances: dict[DeviceUuid, Instance] = {}
        self._walked_ns: int | None = None

    def instances(self) -> list[Instance]:
        """In NVML's order."""
        return sorted(self._instances.values(), key=lambda instance: instance.device.mig_index or 0)

    def instance(self, uuid: DeviceUuid) -> Instance | None:
        """One of them; None when it is gone."""
        return self._instances.get(uuid)

    def walk(self, now_ns: int) -> None:
        """Notice what has come and gone on a GPU that is there. Raises DeviceLostError or NvmlDownError."""
        uuid = self._gpu.device.uuid
        mode = self._calls.try_call(uuid, "nvmlDeviceGetMigMode", self._gpu.handle)
        if mode is None and self._calls.supports(uuid, "nvmlDeviceGetMigMode"):
            return  # no answer this time: nothing is known to have changed
        on = mode is not None and mode[0] == self._calls.api.NVML_DEVICE_MIG_ENABLE
        changed = self._gpu.become_split(on)
        if not on and not self._instances:
            return
        if changed or self._is_due(now_ns):
            failures = self._calls.errors.total()
            present = self._present() if on else {}
            complete = self._calls.errors.total() == failures
            self._walked_ns = now_ns if complete else None
            self._keep(present, complete)

    def _is_due(self, now_ns: int) -> bool:
        if self._walked_ns is None or any(instance.lost for instance in self._instances.values()):
            return True
        return now_ns - self._walked_ns >= WALK_EVERY_NS

    def _present(self) -> dict[DeviceUuid, tuple[int, Any]]:
        """UUID → position and handle. Positions may have gaps."""
        owner = f"{self._gpu.device.uuid}/mig"
        self._calls.forget(owner)  # "not supported" may only have meant: not at that moment
        found: dict[DeviceUuid, tuple[int, Any]] = {}
        count = self._calls.try_call(owner, "nvmlDeviceGetMaxMigDeviceCount", self._gpu.handle) or 0
        for position in range(count):
            handle = self._calls.try_call(owner, "nvmlDeviceGetMigDeviceHandleByIndex", self._gpu.handle, position)
            uuid = None if handle is None else as_text(self._calls.try_call(owner, "nvmlDeviceGetUUID", handle))
            if uuid is not None:
                found[DeviceUuid(uuid)] = (position, handle)
        return found

    def _keep(self, present: dict[DeviceUuid, tuple[int, Any]], complete: bool) -> None:
        for uuid in self._instances.keys() - present.keys() if complete else ():
            self._instances.pop(uuid).lose()
        for uuid, (position, handle) in present.items():
            instance = self._instances.get(uuid)
            if instance is None:
                instance = self._instances[uuid] = describe_instance(self._calls, self._gpu, uuid, handle)
            instance.handle, instance.device = handle, replace(instance.device, mig_index=position)


def describe_instance(calls: Calls, gpu: Gpu, uuid: DeviceUuid, handle: Any) -> Instance:
    """An instance with its constant properties. Raises DeviceLostError or NvmlDownError."""
    name = as_text(calls.try_call(uuid, "nvmlDeviceGetName", handle))
    attributes = calls.try_call(uuid, "nvmlDeviceGetAttributes", handle)
    memory = calls.try_call(uuid, "nvmlDeviceGetMemoryInfo", handle)
    total = attributes.memorySizeMB * MIB if memory is None and attributes is not None else None
    device = Device(
        index=gpu.device.index,
        uuid=uuid,
        name=name or f"{gpu.device.name} MIG",
        pci_bus_id=gpu.device.pci_bus_id,
        sm_count=(int(attributes.multiprocessorCount) or None) if attributes is not None else None,
        memory_total_bytes=total if memory is None else int(memory.total),
        parent=gpu.device.uuid,
        mig_profile=_profile(name, attributes),
        minor=gpu.device.minor,
    )
    number = calls.try_call(uuid, "nvmlDeviceGetGpuInstanceId", handle)
    return Instance(calls, device, handle, gpu, int(number) if number is not None and _is_whole(attributes) else None)


def _is_whole(attributes: Any | None) -> bool:
    """GPM counts for a GPU instance: the part of one of several compute instances in it is unknown."""
    return attributes is not None and attributes.gpuInstanceSliceCount == attributes.computeInstanceSliceCount


def _profile(name: str | None, attributes: Any | None) -> str | None:
    """ "3g.40gb", "1c.3g.40gb": from the name, else from the slices (older drivers name the GPU only)."""
    found = _PROFILE.search(name or "")
    if found or attributes is None:
        return found[1] if found else None
    part = "" if _is_whole(attributes) else f"{attributes.computeInstanceSliceCount}c."
    return f"{part}{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
