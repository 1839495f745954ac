# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Devices and the kernel's slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import DeviceUuid
from agent.probes.abi import SLOTS
from enforce.actuators.launch.levels import assign

nodes = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=24), max_size=12)


@given(nodes)
def test_each_device_has_a_slot_of_its_own_and_keeps_it_while_it_is_there(ticks: list[list[int]]) -> None:
    slots: dict[DeviceUuid, int] = {}
    for numbers in ticks:
        present = [DeviceUuid(f"MIG-{number}") for number in numbers]
        now = assign(slots, present)
        assert len(now) == min(len(present), SLOTS)
        assert len(set(now.values())) == len(now)
        assert all(0 <= slot < SLOTS for slot in now.values())
        assert all(now[device] == slot for device, slot in slots.items() if device in present)
        slots = now


def test_what_a_device_that_left_had_is_given_to_the_next() -> None:
    full = assign({}, [DeviceUuid(str(number)) for number in range(SLOTS)])
    without = [device for device in full if device != "3"]
    assert assign(full, [*without, DeviceUuid("new")])[DeviceUuid("new")] == 3
