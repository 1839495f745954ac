# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How busy the online side keeps a device, as the kernel's gates say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import DeviceUuid, OnlineUse
from agent.probes.abi import SLOTS, Gate
from enforce.actuators.launch.pace import GateReader, busiest

MS = 1_000_000
STEP = 100 * MS


def points(ratios: list[float]) -> list[tuple[int, int]]:
    """A point every 100 ms, in each of which the device was busy for such a share."""
    found, busy = [(0, 0)], 0
    for number, ratio in enumerate(ratios, 1):
        busy += int(ratio * STEP)
        found.append((number * STEP, busy))
    return found


def test_a_burst_counts_as_what_it_is_and_not_as_the_mean() -> None:
    assert busiest(points([0.1] * 20 + [0.9] * 3 + [0.1] * 20)) == pytest.approx(0.9)


def test_what_was_not_seen_for_long_enough_is_unknown() -> None:
    assert busiest(points([0.5])) is None


@given(st.lists(st.floats(0, 1), min_size=3, max_size=60))
def test_the_busiest_is_no_less_than_the_mean_and_no_more_than_the_most(ratios: list[float]) -> None:
    found = busiest(points(ratios))
    assert found is not None
    assert min(ratios) - 1e-6 <= found <= max(ratios) + 1e-6


def test_what_is_over_for_ten_seconds_is_forgotten() -> None:
    gates, device = [Gate() for _ in range(SLOTS)], DeviceUuid("GPU-0")
    reader, busy = GateReader(gates, 20 * MS), []
    for number in range(130):
        if number < 10:
            gates[0].busy_total_ns += 90 * MS
        busy.append(reader.busy({device: 0}, number * STEP).get(device))
    assert busy[9] == pytest.approx(0.9)
    assert busy[100] == pytest.approx(0.9, abs=0.35)
    assert busy[-1] == 0.0


def test_the_online_time_of_a_device_and_its_gaps_are_counters() -> None:
    gates, devices = [Gate() for _ in range(SLOTS)], {DeviceUuid("GPU-0"): 0, DeviceUuid("GPU-1"): 1}
    reader = GateReader(gates, 20 * MS)
    assert reader.online(devices, STEP) == {}  # no request ran on either
    gates[1].requests, gates[1].busy_total_ns = 3, 450 * MS
    assert reader.online(devices, STEP) == {DeviceUuid("GPU-1"): OnlineUse(0.45, 3)}
    gates[1].requests, gates[1].open, gates[1].busy_since_ns, gates[1].last_online_ns = 4, 1, 5 * STEP, 5 * STEP
    assert reader.online(devices, 5 * STEP + 10 * MS) == {DeviceUuid("GPU-1"): OnlineUse(0.46, 4)}
    gates[1].open = 0  # over, and the kernel has not booked it yet
    assert reader.online(devices, 6 * STEP) == {DeviceUuid("GPU-1"): OnlineUse(0.46, 4)}
    assert reader.online({DeviceUuid("GPU-0"): 0}, 7 * STEP) == {}
