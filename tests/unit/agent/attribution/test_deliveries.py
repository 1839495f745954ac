# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How long a process's work takes, by its own waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.durations import LaunchTimes, delivered_ns, median_of_bounds
from agent.collectors.samples import Delivered
from agent.core.model import ProcessId
from tests.support.kernel_records import delivery

A = ProcessId(10, 1)


def test_without_pauses_the_work_took_as_long_as_it_took() -> None:
    assert delivered_ns(delivery(launches=10, elapsed_ns=5_000, elapsed_busy_ns=1_000)) == 4_000


def test_a_wait_longer_than_what_was_queued_means_longer_kernels() -> None:
    seen = delivery(launches=10, charged_ns=1_000, queued_ns=300, waited_ns=800, elapsed_ns=9_000, pauses=3)
    assert delivered_ns(seen) == 1_500


def test_an_empty_queue_at_the_wait_means_shorter_kernels() -> None:
    seen = delivery(launches=10, charged_ns=1_000, queued_ns=300, waited_ns=0, elapsed_ns=9_000, pauses=3)
    assert delivered_ns(seen) < 1_000


def test_contention_does_not_count_as_work() -> None:
    times = LaunchTimes()
    for elapsed in [1000] * 8 + [5000] * 8:
        times.observe(delivery(launches=10, elapsed_ns=elapsed))
    assert times.per_launch_ns(A) == 100


def test_a_process_that_never_waited_has_no_duration() -> None:
    assert LaunchTimes().per_launch_ns(A) is None


def test_an_assumed_launch_time_is_used_until_the_process_waits() -> None:
    times = LaunchTimes()
    times.assume({A: 70.0})
    assert times.per_launch_ns(A) == 70
    assert times.processes() == {A}
    times.observe(delivery(launches=10, elapsed_ns=1_000))
    times.assume({A: 70.0})
    assert times.per_launch_ns(A) == 100
    times.forget(A)
    assert times.per_launch_ns(A) is None


def learned(*deliveries: Delivered) -> float | None:
    """By one after another."""
    times = LaunchTimes()
    for one in deliveries:
        times.observe(one)
        known = times.per_launch_ns(A)
    return known


CLEAR = delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=900, pauses=3)


def test_an_estimate_stays_where_a_request_that_ran_meanwhile_may_explain_the_wait() -> None:
    blurred = delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=900, waited_busy_ns=800, pauses=3)
    assert learned(blurred) == 100  # … and before anything is known, the most that it may have taken
    assert learned(CLEAR, *[blurred] * 100) == 100


def test_an_estimate_moves_as_far_as_requests_that_ran_meanwhile_cannot_explain() -> None:
    longer = delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=50_900, waited_busy_ns=25_000, pauses=3)
    assert learned(CLEAR, *[longer] * 100) == 2_600
    shorter = delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=450, waited_busy_ns=400, pauses=3)
    assert learned(CLEAR, *[shorter] * 100) == 50


def test_what_a_neighbour_ran_meanwhile_makes_no_kernel_longer() -> None:
    times, shared = LaunchTimes(), delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=1_800, pauses=3)
    times.observe(shared, own_ratio=0.5)
    assert times.per_launch_ns(A) == 100


def test_without_pauses_neighbours_are_not_counted_for_each_wait_is_as_long_as_it_was() -> None:
    times = LaunchTimes()
    times.observe(delivery(launches=10, elapsed_ns=1_000), own_ratio=0.5)
    assert times.per_launch_ns(A) == 100


def test_deliveries_that_say_nothing_outvote_none_that_say_something() -> None:
    long = [delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=2_900, pauses=3)] * 6
    says_nothing = delivery(
        launches=10, charged_ns=1_000, queued_ns=900, waited_ns=9_900, waited_busy_ns=9_900, pauses=3
    )
    short = delivery(launches=10, charged_ns=1_000, queued_ns=900, waited_ns=900, pauses=3)
    assert learned(*long) == 300
    assert learned(*long, *[says_nothing] * 20, *[short] * 4) == 100


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=5, max_size=24), st.floats(0, 10**6))
def test_no_other_estimate_is_nearer_to_all_deliveries_and_one_as_near_is_kept(
    pairs: list[tuple[int, int]], known: float
) -> None:
    bounds = [(float(min(pair)), float(max(pair))) for pair in pairs]

    def distance(value: float) -> float:
        return sum(max(low - value, value - high, 0) for low, high in bounds)

    least = min(distance(end) for pair in bounds for end in pair)
    assert distance(median_of_bounds(bounds, None)) == least
    assert distance(median_of_bounds(bounds, known)) == pytest.approx(least)
    if distance(known) == least:
        assert median_of_bounds(bounds, known) == known


def test_what_ran_while_requests_did_before_the_wait_does_not_make_an_estimate_shorter() -> None:
    run_already = delivery(
        launches=10,
        charged_ns=1_000,
        queued_ns=1_000,
        waited_ns=100,
        elapsed_ns=50_000,
        elapsed_busy_ns=49_000,
        pauses=9,
    )
    assert learned(CLEAR, *[run_already] * 100) == 100


def test_the_same_holds_for_a_process_that_was_not_stopped() -> None:
    alone = delivery(launches=10, elapsed_ns=1_000)
    assert learned(alone, *[delivery(launches=10, elapsed_ns=5_000, elapsed_busy_ns=4_500)] * 100) == 100
    assert learned(alone, *[delivery(launches=10, elapsed_ns=9_000, elapsed_busy_ns=4_000)] * 100) == 500
