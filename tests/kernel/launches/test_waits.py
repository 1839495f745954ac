# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A request is the first launch after a drained wait until the wait that drains it: one latency each."""

from __future__ import annotations

import pytest

from agent.probes.abi import ProcessKey
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver, bounds, latencies

KERNEL_NS = 2_000_000
LAUNCH = f"launch:1x1x1:32x1x1:0:{KERNEL_NS}"
WAITS = {
    "sync": (),
    "sync_stream": (),
    "sync_event": (),
    "copy_htod:64": ("alloc:1048576",),
    "copy_dtoh:64": ("alloc:1048576",),
    "rect_dtoh:8:8": ("alloc:1048576",),
}


@pytest.mark.parametrize("streams", ["legacy", "per-thread"])
@pytest.mark.parametrize("through", ["symbol", "pointer"])
@pytest.mark.parametrize("wait", WAITS)
def test_each_request_is_one_latency(
    driver: Driver, probes: LibcudaProbes, wait: str, through: str, streams: str
) -> None:
    request = (f"3*{LAUNCH}", wait)
    driven = driver.run(f"through={through}", f"streams={streams}", *WAITS[wait], *request * 5)
    found = latencies(probes, driven.process)
    assert found.count == sum(found.buckets) == 5
    assert found.sum_ns >= 5 * 3 * KERNEL_NS
    least, most = bounds(found)
    assert least <= found.sum_ns < most


def test_a_request_begins_at_its_first_launch(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("alloc:1048576", LAUNCH, "copy_dtod:64", LAUNCH, "sync")  # here this copy waits for the first
    found = latencies(probes, driven.process)
    assert found.count == 1
    assert found.sum_ns >= 2 * KERNEL_NS


def test_a_wait_with_nothing_to_wait_for_is_no_request(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("5*sync", LAUNCH, "5*sync")
    assert latencies(probes, driven.process).count == 1


def test_launches_without_a_wait_are_no_request(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"5*{LAUNCH}")
    assert latencies(probes, driven.process) is None


def test_a_copy_that_returns_at_once_ends_no_request(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("alloc:1048576", LAUNCH, "3*copy_htod_async:64", "3*copy_dtod:64", "3*set8:64")
    assert latencies(probes, driven.process) is None


def test_each_thread_has_requests_of_its_own(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("threads=3", *(LAUNCH, "sync") * 4)
    found = latencies(probes, driven.process)
    assert found.count == sum(found.buckets) == 3 * 4


def test_a_delivery_counts_what_was_launched_between_two_drained_waits(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"3*{LAUNCH}", "sync", f"5*{LAUNCH}", "sync")
    found = probes.map("delivered").get(ProcessKey.of(driven.process))
    assert found is not None
    assert found.count == 2
    assert [found.ring[n].launches for n in range(2)] == [3, 5]
    for delivery, launches in zip(found.ring[:2], (3, 5), strict=True):
        assert delivery.elapsed_ns >= launches * KERNEL_NS
        assert delivery.elapsed_ns >= delivery.waited_ns


def test_a_delivery_does_not_begin_with_a_thread_that_ended(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("threads=0", f"1+{LAUNCH}", f"3*{LAUNCH}", "sync")
    found = probes.map("delivered").get(ProcessKey.of(driven.process))
    assert found is not None
    assert [found.ring[n].launches for n in range(found.count)] == [3]


def test_a_delivery_ends_with_the_wait_for_all_work_though_another_thread_that_launched_never_waits(
    driver: Driver, probes: LibcudaProbes
) -> None:
    step = (LAUNCH, f"1&2*{LAUNCH}", LAUNCH, "sync_stream")  # as PyTorch trains: backward is another thread's
    driven = driver.run("threads=0", *step * 3)
    found = probes.map("delivered").get(ProcessKey.of(driven.process))
    assert found is not None
    assert [found.ring[n].launches for n in range(found.count)] == [4, 4, 4]
