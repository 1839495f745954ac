# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which device a process means by 0, 1, …"""

from __future__ import annotations

import pytest

from agent.core.device_ordinals import bus_place, device_of, visible_devices
from agent.core.model import Device, DeviceUuid


def gpu(index: int, name: str = "H200", minor: int | None = None) -> Device:
    number = index if minor is None else minor
    return Device(index, DeviceUuid(f"GPU-{index:08x}"), name, f"0000:{index:02x}:00.0", 132, 1, minor=number)


def instance(number: int, of: Device) -> Device:
    return Device(of.index, DeviceUuid(f"MIG-{number:08x}"), "MIG", of.pci_bus_id, 16, 1, parent=of.uuid)


GPUS = [gpu(0), gpu(1), gpu(2)]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("", []),
        ("-1", []),
        ("GPU-00000001", [1]),
        ("GPU-0000000", []),  # names none of them alone
        (" 1 , 2", [1, 2]),
        ("none", []),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(visible: str | None, indices: list[int]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_devices(environment, GPUS) == tuple(GPUS[index].uuid for index in indices)


def test_in_a_container_numbers_begin_with_the_first_device_that_it_was_given() -> None:
    assert visible_devices({}, GPUS, exposed={1, 2}) == (GPUS[1].uuid, GPUS[2].uuid)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, GPUS, exposed={1, 2}) == (GPUS[2].uuid,)


def test_numbers_of_unlike_gpus_are_only_known_in_bus_order() -> None:
    mixed = [gpu(0, "L4"), gpu(1, "H200")]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0"}, mixed) == ()
    in_order = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_devices(in_order, mixed) == (mixed[0].uuid,)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-00000001"}, mixed) == (mixed[1].uuid,)


def test_of_mig_instances_only_one_that_is_named_is_known() -> None:
    split = [gpu(0), instance(1, gpu(0)), instance(2, gpu(0)), gpu(1)]
    assert visible_devices({}, split) == ()
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-00000002"}, split) == (split[2].uuid,)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "MIG-00000002,MIG-00000001"}, split) == (split[2].uuid,)
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1"}, split) == (split[3].uuid,)


def test_an_ordinal_is_the_process_s_own_and_what_is_unknown_is_the_only_device_in_use() -> None:
    a, b = GPUS[0].uuid, GPUS[1].uuid
    assert device_of(1, (b, a), []) == a
    assert device_of(None, (a,), []) == a
    assert device_of(None, (a, b), [b]) == b
    assert device_of(None, (a, b), [a, b]) is None
    assert device_of(0, (), [b]) == b
    assert device_of(5, (a, b), []) is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0000:01:00.0", (0, 1, 0)),
        ("00000000:C1:00.0", (0, 0xC1, 0)),
        ("0001:0a:1f", (1, 10, 31)),
        ("a:0.0", (0, 10, 0)),
        ("", None),
        ("GPU-1", None),
        ("0:0:0:0", None),
        ("0000:01:00.0 ", None),
    ],
)
def test_a_place_on_the_bus_is_the_same_however_it_is_written(text: str, place: tuple[int, int, int] | None) -> None:
    assert bus_place(text) == place
