# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the driver told a process about its ordinals, against the devices that NVML knows."""

from __future__ import annotations

from agent.evidence import Evidence, bare_uuid
from agent.model import Device, DeviceReading, DeviceUuid, ProcessId
from agent.procfs import Procfs
from agent.samples import OrdinalBusId, OrdinalUuid, Sample
from tests.unit.snapshots import GPU_0, GPU_1, device

PROCESS = ProcessId(4711, 99)
NOBODY = Procfs("/nonexistent")
READINGS = [DeviceReading(device(0, GPU_0)), DeviceReading(device(1, GPU_1))]


def told(*samples: Sample) -> dict[int, DeviceUuid]:
    """Ordinal → device."""
    found = Evidence.of([*READINGS, *samples], NOBODY).told
    return {ordinal: uuid for (process, ordinal), uuid in found.items() if process == PROCESS}


def named(ordinal: int, uuid: DeviceUuid) -> OrdinalUuid:
    return OrdinalUuid(PROCESS, ordinal, bytes.fromhex(bare_uuid(uuid)))


def test_an_ordinal_is_the_device_whose_uuid_or_place_on_the_bus_the_process_was_told() -> None:
    assert told(named(0, GPU_1)) == {0: GPU_1}
    assert told(OrdinalBusId(PROCESS, 0, "0000:02:00.0")) == {0: GPU_1}
    assert told(named(0, GPU_0), OrdinalBusId(PROCESS, 1, "2:0.0")) == {0: GPU_0, 1: GPU_1}


def test_a_uuid_says_more_than_a_place_on_the_bus() -> None:
    assert told(OrdinalBusId(PROCESS, 0, "0000:02:00.0"), named(0, GPU_0)) == {0: GPU_0}


def test_what_is_no_device_here_says_nothing() -> None:
    assert told(named(0, DeviceUuid("GPU-ffffffff-aaaa-bbbb-cccc-dddddddddddd"))) == {}
    assert told(OrdinalBusId(PROCESS, 0, "0000:77:00.0"), OrdinalBusId(PROCESS, 1, "\x1b[31m")) == {}


def test_of_a_gpu_that_is_split_neither_says_which_instance_is_meant() -> None:
    whole = device(0, GPU_0)
    part = Device(0, DeviceUuid("MIG-1"), "MIG", whole.pci_bus_id, 16, 1, parent=GPU_0)
    ordinals: list[Sample] = [named(0, GPU_0), OrdinalBusId(PROCESS, 1, "0000:01:00.0")]
    assert Evidence.of([DeviceReading(whole), DeviceReading(part), *ordinals], NOBODY).told == {}
