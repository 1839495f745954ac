# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Attribution: the parts add up to the device, whatever is missing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.split import Work, attribute, split_activity, without_instances
from agent.core.model import Device, DeviceReading, DeviceUuid, ProcessId

DEVICE = Device(0, DeviceUuid("GPU-1"), "GPU", "0000:01:00.0", 132, 80 << 30)
SECOND = 1_000_000_000
ratios = st.one_of(st.none(), st.floats(0, 1))
counts = st.one_of(st.none(), st.integers(0, 1 << 40))


def process(number: int) -> ProcessId:
    return ProcessId(number, 1)


@st.composite
def work(draw: st.DrawFn) -> list[Work]:
    numbers = draw(st.lists(st.integers(2, 500), unique=True, max_size=8))
    return [
        Work(
            process(number),
            draw(counts),
            draw(st.one_of(st.none(), st.floats(0, 2 * SECOND))),
            draw(counts),
            draw(counts),
            draw(counts),
        )
        for number in numbers
    ]


@given(
    work(),
    ratios,
    counts,
    st.one_of(st.none(), st.floats(0, 1e12)),
    st.sampled_from([0, SECOND, 100_000_000, 7_123_456_789]),
)
def test_containers_and_unattributed_add_up_to_the_device(
    items: list[Work], activity: float | None, memory: int | None, pcie: float | None, interval: int
) -> None:
    reading = DeviceReading(
        DEVICE,
        sm_activity_ratio=activity,
        memory_used_bytes=memory,
        pcie_tx_bytes_per_second=pcie,
        pcie_rx_bytes_per_second=pcie,
    )
    result = attribute(reading, items, interval)
    rows = list(result.usage.values())
    for name, device_name in (
        ("sm_ratio", "sm_activity_ratio"),
        ("memory_bytes", "memory_used_bytes"),
        ("pcie_tx_bytes_per_second", "pcie_tx_bytes_per_second"),
        ("pcie_rx_bytes_per_second", "pcie_rx_bytes_per_second"),
    ):
        device, rest = getattr(result.reading, device_name), getattr(result.unattributed, name)
        if device is None:
            assert rest is None
            continue
        parts = [value for row in rows if (value := getattr(row, name)) is not None]
        assert math.isclose(sum(parts) + rest, device, rel_tol=1e-9, abs_tol=1e-9)


@given(work(), st.sampled_from([SECOND]))
def test_what_is_unknown_stays_unknown(items: list[Work], interval: int) -> None:
    result = attribute(DeviceReading(DEVICE), items, interval)
    for one in items:
        usage = result.usage[one.process]
        assert (usage.memory_bytes is None) == (one.memory_bytes is None)
        assert (usage.sm_ratio is None) == (one.sm_ns is None)
        assert (usage.launches_per_second is None) == (one.launches is None)


def test_estimates_are_scaled_to_what_the_device_measured() -> None:
    shares = split_activity(0.9, {process(2): 0.4, process(3): 0.8})
    assert shares[process(2)] == pytest.approx(0.3)
    assert shares[process(3)] == pytest.approx(0.6)


def test_activity_that_no_process_explains_stays_unattributed() -> None:
    assert split_activity(0.9, {process(2): 0.2}) == {process(2): 0.2}


def test_nothing_is_scaled_up_while_a_process_is_unknown() -> None:
    assert split_activity(0.9, {process(2): 0.6, process(3): None}) == {process(2): 0.6, process(3): None}


def test_what_an_unknown_process_did_is_not_attributed_to_the_others() -> None:
    reading = DeviceReading(DEVICE, sm_activity_ratio=0.8)
    known = Work(process(2), 10, 0.5 * SECOND, 0, 0, 0)
    alone = attribute(reading, [known], SECOND)
    assert alone.usage[process(2)].sm_ratio == 0.8
    shared = attribute(reading, [known], SECOND, others=True)
    assert shared.usage[process(2)].sm_ratio == 0.5
    assert shared.unattributed.sm_ratio == pytest.approx(0.3)


@pytest.mark.parametrize("counted", [90.0, 100.0, 130.0])  # by the GPU's own counter, read at another instant
def test_a_gpu_that_is_split_has_at_least_the_traffic_of_its_instances(counted: float) -> None:
    second, known = 1_000_000_000, 100
    whole, part = (
        DeviceReading(
            Device(0, DeviceUuid(name), "", "", None, None, parent=parent),
            pcie_tx_bytes_per_second=tx,
            pcie_rx_bytes_per_second=tx,
        )
        for name, parent, tx in (("GPU-1", None, counted), ("MIG-1", DeviceUuid("GPU-1"), None))
    )
    instance = attribute(part, [Work(process(1), 1, None, known, known, None)], second)
    after = without_instances(attribute(whole, [], second), [instance])
    for total, rest in (
        (after.reading.pcie_tx_bytes_per_second, after.unattributed.pcie_tx_bytes_per_second),
        (after.reading.pcie_rx_bytes_per_second, after.unattributed.pcie_rx_bytes_per_second),
    ):
        assert total == max(counted, known)
        assert rest == max(counted, known) - known
