# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Attribution: the parts add up to the device, whatever is missing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.split import MEASURED_ERROR, Present, Work, attribute, split_activity, without_instances
from agent.core.model import Device, DeviceReading, DeviceUuid, ProcessId, Provenance

DEVICE = Device(0, DeviceUuid("GPU-1"), "GPU", "0000:01:00.0", 132, 80 << 30)
SECOND = 1_000_000_000
ratios = st.one_of(st.none(), st.floats(0, 1))
EXCESS = {
    "sm_ratio": "",
    "memory_bytes": "memory_excess_bytes",
    "pcie_tx_bytes_per_second": "pcie_tx_excess_bytes_per_second",
    "pcie_rx_bytes_per_second": "pcie_rx_excess_bytes_per_second",
}
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
        device, rest = getattr(reading, device_name), getattr(result.unattributed, name)
        excess = getattr(result.unattributed, EXCESS[name], 0)
        if device is None:
            assert rest is None
            continue
        assert rest >= 0
        assert excess >= 0
        parts = [value for row in rows if (value := getattr(row, name)) is not None]
        assert math.isclose(sum(parts) + rest, device + excess, rel_tol=1e-9, abs_tol=1e-9)
        assert name != "sm_ratio" or sum(parts) <= device + 1e-9


@given(work(), st.sampled_from([SECOND]))
def test_what_is_unknown_stays_unknown(items: list[Work], interval: int) -> None:
    result = attribute(DeviceReading(DEVICE), items, interval)
    for one in items:
        usage = result.usage[one.process]
        assert (usage.memory_bytes is None) == (one.memory_bytes is None)
        assert (usage.sm_ratio is None) == (one.sm_ns is None)
        assert (usage.launches_per_second is None) == (one.launches is None)


@given(
    st.dictionaries(st.integers(2, 20).map(process), st.tuples(st.floats(0, 2), st.floats(0, 0.5), st.floats(0, 1))),
    st.floats(0, 1),
)
def test_no_process_has_more_than_its_launches_and_the_error_of_their_durations_explain(
    parts: dict[ProcessId, tuple[float, float, float]], activity: float
) -> None:
    estimates, errors, pending = ({one: part[n] for one, part in parts.items()} for n in range(3))
    shares, left = split_activity(activity, estimates, errors, pending)
    assert sum(share or 0.0 for share in shares.values()) <= activity + 1e-9
    for one, share in shares.items():
        assert share is not None
        assert -1e-9 <= share <= estimates[one] + errors[one] + pending[one] + 1e-9
        assert left.get(one, 0.0) >= 0


def test_estimates_are_scaled_to_what_the_device_measured() -> None:
    shares, _ = split_activity(0.9, {process(2): 0.4, process(3): 0.8}, {}, {})
    assert shares[process(2)] == pytest.approx(0.3)
    assert shares[process(3)] == pytest.approx(0.6)


def test_the_less_certain_process_gives_more() -> None:
    shares, _ = split_activity(0.9, {process(2): 0.5, process(3): 0.5}, {process(2): 0.01, process(3): 0.3}, {})
    assert shares[process(2)] == pytest.approx(0.5 - 0.1 * 0.01 / 0.31)
    assert sum(share or 0.0 for share in shares.values()) == pytest.approx(0.9)


def test_activity_that_no_launch_explains_stays_unattributed() -> None:
    shares, _ = split_activity(0.45, {process(2): 0.15, process(3): 0.10}, {process(2): 0.01, process(3): 0.01}, {})
    assert shares == {process(2): pytest.approx(0.16), process(3): pytest.approx(0.11)}


def test_an_unknown_process_leaves_the_others_what_they_launched() -> None:
    shares, _ = split_activity(0.9, {process(2): 0.6, process(3): None}, {process(2): 0.02}, {})
    assert shares == {process(2): pytest.approx(0.62), process(3): None}


def test_what_did_not_run_in_one_tick_runs_in_the_next() -> None:
    _, left = split_activity(0.9, {process(2): 1.5}, {process(2): 0.0}, {})
    shares, _ = split_activity(0.25, {process(2): 0.0}, {process(2): 0.0}, left)
    assert shares == {process(2): pytest.approx(0.25)}


def test_a_device_is_measured_only_where_nvml_lists_the_one_process_that_worked_on_it() -> None:
    reading = DeviceReading(DEVICE, sm_activity_ratio=0.8)
    known = Work(process(2), 10, 0.5 * SECOND, 0, 0, 0, sm_error_ns=0.02 * SECOND)
    sole = attribute(reading, [known], SECOND, Present(sole=process(2))).usage[process(2)]
    assert (sole.sm_ratio, sole.sm_provenance, sole.sm_error_ratio) == (0.8, Provenance.MEASURED, MEASURED_ERROR)
    shared = attribute(reading, [known], SECOND, Present(others=True))
    usage = shared.usage[process(2)]
    assert usage.sm_ratio == pytest.approx(0.52)
    assert usage.sm_provenance is Provenance.ESTIMATED
    assert usage.sm_error_ratio == pytest.approx(0.02)
    assert shared.unattributed.sm_ratio == pytest.approx(0.28)


def test_the_error_of_a_known_process_says_what_of_the_device_is_not_explained() -> None:
    reading = DeviceReading(DEVICE, sm_activity_ratio=0.8)
    known = Work(process(2), 10, 0.5 * SECOND, 0, 0, 0, sm_error_ns=0.02 * SECOND)
    usage = attribute(reading, [known], SECOND).usage[process(2)]  # no other process can have done the rest
    assert usage.sm_error_ratio == pytest.approx(math.hypot(0.02, 0.28))


def test_bytes_beyond_the_devices_own_are_said_and_its_reading_stays() -> None:
    reading = DeviceReading(DEVICE, memory_used_bytes=10 << 30, pcie_tx_bytes_per_second=50.0)
    result = attribute(reading, [Work(process(2), 1, None, 80, 0, 40 << 30)], SECOND)
    assert result.reading == reading
    assert (result.unattributed.memory_bytes, result.unattributed.memory_excess_bytes) == (0, 30 << 30)
    assert result.unattributed.pcie_tx_bytes_per_second == 0
    assert result.unattributed.pcie_tx_excess_bytes_per_second == pytest.approx(30.0)


@pytest.mark.parametrize("counted", [90.0, 100.0, 130.0])  # by the GPU's own counter, read at another instant
def test_the_traffic_of_instances_is_that_of_their_gpu(counted: float) -> None:
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
    rest = without_instances(attribute(whole, [], second), [instance]).unattributed
    for left, excess in (
        (rest.pcie_tx_bytes_per_second, rest.pcie_tx_excess_bytes_per_second),
        (rest.pcie_rx_bytes_per_second, rest.pcie_rx_excess_bytes_per_second),
    ):
        assert (left, excess) == (max(0.0, counted - known), max(0.0, known - counted))
