# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a process passes in its calls' arguments is not believed beyond what a device can do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.counters import BLOCKS, BYTES, KERNELS, CountedWork, CounterDeltas
from agent.attribution.placement import NvmlListing, Place
from agent.collectors.samples import AllocationCount, CopyCount, LaunchCount, Sample
from agent.core.model import DeviceUuid, ProcessId

LIAR, HONEST = ProcessId(10, 1), ProcessId(11, 1)
PLACE = Place(DeviceUuid("GPU-0"), NvmlListing.LISTED)


def work(tally: CounterDeltas, *samples: Sample) -> dict[ProcessId, CountedWork]:
    return {process: counted for (process, _), counted in tally.tick(samples, lambda process, ordinal: PLACE).items()}


@pytest.mark.parametrize(
    "lie", [CopyCount(LIAR, 0, "host_to_device", (1 << 64) - 1, 1), LaunchCount(LIAR, 0, 7, 1, 1 << 63, 1 << 63, 1)]
)
def test_more_than_a_device_can_do_is_cut_and_counted_and_no_other_process_is_touched(lie: Sample) -> None:
    tally = CounterDeltas()
    found = work(tally, lie, CopyCount(HONEST, 0, "host_to_device", 4096, 1))
    assert found[HONEST] == CountedWork(pcie_rx_bytes=4096)
    assert found[LIAR].pcie_rx_bytes <= BYTES.at_once
    assert found[LIAR].kernels <= KERNELS.at_once
    assert sum(one.blocks for one in found[LIAR].functions.values()) <= BLOCKS.at_once
    assert tally.implausible >= 1


def test_what_is_believed_of_a_liar_grows_with_time_alone() -> None:
    tally, launches = CounterDeltas(), 1_000_000
    totals = [
        work(tally, LaunchCount(LIAR, 0, 7, tick * launches, tick * launches << 20, 0, 1))[LIAR].kernels
        for tick in range(1, 11)
    ]
    assert totals == [KERNELS.at_once, *[KERNELS.per_second] * 9]
    assert tally.implausible == 10


def test_a_process_that_asked_for_too_much_is_believed_again_after_a_while() -> None:
    tally = CounterDeltas()
    work(tally, CopyCount(LIAR, 0, "host_to_device", 1 << 60, 1))
    assert work(tally, CopyCount(LIAR, 0, "host_to_device", (1 << 60) + 512, 2))[LIAR].pcie_rx_bytes == 512


@given(
    st.lists(
        st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, 10**10)), max_size=30
    )
)
def test_whatever_the_kernel_holds_no_more_is_believed_than_the_time_allows(
    ticks: list[tuple[int, int, int]],
) -> None:
    tally, seconds, kernels, copied = CounterDeltas(), 0.0, 0, 0
    for number, (so_many, so_much, interval_ns) in enumerate(ticks, 1):
        samples = LaunchCount(LIAR, 0, 7, number, so_many, so_much, 1), CopyCount(LIAR, 0, "to_peer", so_much, 1)
        found = tally.tick(samples, lambda process, ordinal: PLACE, interval_ns).get(
            (LIAR, PLACE.device), CountedWork()
        )
        seconds += interval_ns / 1e9
        kernels, copied = kernels + found.kernels, copied + found.peer_tx_bytes
        assert min(found.kernels, found.peer_tx_bytes) >= 0
    assert kernels <= KERNELS.at_once + KERNELS.per_second * seconds + 1
    assert copied <= BYTES.at_once + BYTES.per_second * seconds + 1


def test_live_bytes_that_are_below_zero_or_beyond_any_device_are_none() -> None:
    below = (1 << 64) - 4096
    found = work(CounterDeltas(), AllocationCount(LIAR, 0, {"plain": below, "pool": 1 << 47, "array": 512}, below, 0))
    assert found[LIAR].live_bytes == {"plain": 0, "pool": 0, "array": 512}
    assert found[LIAR].peak_bytes <= 1 << 46


def test_a_copy_to_another_device_is_no_traffic_with_the_host() -> None:
    samples = CopyCount(HONEST, 0, "to_peer", 4096, 1), CopyCount(HONEST, 0, "from_peer", 512, 1)
    assert work(CounterDeltas(), *samples) == {HONEST: CountedWork(peer_tx_bytes=4096, peer_rx_bytes=512)}
