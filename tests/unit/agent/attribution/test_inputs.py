# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the driver answered a process about its ordinals, against the devices that NVML knows."""

from __future__ import annotations

from agent.attribution.inputs import TickInputs, bare_uuid
from agent.collectors.samples import OrdinalBusId, OrdinalUuid, Sample
from agent.core.model import Device, DeviceReading, DeviceUuid, ProcessId
from agent.node.procfs import Procfs
from tests.support.snapshots import GPU_0, GPU_1, device

PROCESS = ProcessId(4711, 99)
NOBODY = Procfs("/nonexistent")
READINGS = [DeviceReading(device(0, GPU_0)), DeviceReading(device(1, GPU_1))]


def by_ordinal(*samples: Sample) -> dict[int, DeviceUuid]:
    """Ordinal → device."""
    found = TickInputs.of([*READINGS, *samples], NOBODY).driver_devices
    return {ordinal: uuid for (process, ordinal), uuid in found.items() if process == PROCESS}


def named(ordinal: int, uuid: DeviceUuid) -> OrdinalUuid:
    return OrdinalUuid(PROCESS, ordinal, bytes.fromhex(bare_uuid(uuid)))


def test_an_ordinal_is_the_device_whose_uuid_or_pci_address_the_driver_answered() -> None:
    assert by_ordinal(named(0, GPU_1)) == {0: GPU_1}
    assert by_ordinal(OrdinalBusId(PROCESS, 0, "0000:02:00.0")) == {0: GPU_1}
    assert by_ordinal(named(0, GPU_0), OrdinalBusId(PROCESS, 1, "2:0.0")) == {0: GPU_0, 1: GPU_1}


def test_a_uuid_comes_before_a_pci_address() -> None:
    assert by_ordinal(OrdinalBusId(PROCESS, 0, "0000:02:00.0"), named(0, GPU_0)) == {0: GPU_0}


def test_an_unknown_uuid_or_address_is_no_device() -> None:
    assert by_ordinal(named(0, DeviceUuid("GPU-ffffffff-aaaa-bbbb-cccc-dddddddddddd"))) == {}
    assert by_ordinal(OrdinalBusId(PROCESS, 0, "0000:77:00.0"), OrdinalBusId(PROCESS, 1, "\x1b[31m")) == {}


def test_neither_identifies_an_instance_of_a_gpu_that_is_split() -> None:
    whole = device(0, GPU_0)
    part = Device(0, DeviceUuid("MIG-1"), "MIG", whole.pci_bus_id, 16, 1, parent=GPU_0)
    ordinals: list[Sample] = [named(0, GPU_0), OrdinalBusId(PROCESS, 1, "0000:01:00.0")]
    assert TickInputs.of([DeviceReading(whole), DeviceReading(part), *ordinals], NOBODY).driver_devices == {}
