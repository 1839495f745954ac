# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Durations of functions, learned from what was launched between two waits and how long that took."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.durations import OTHER, FunctionTimes
from tests.support.kernel_records import A, delivery


def test_functions_whose_mix_varies_are_distinguished() -> None:
    rng, times = random.Random(1), FunctionTimes()
    for _ in range(400):
        short, long = rng.randrange(1, 50), rng.randrange(1, 10)
        elapsed = short * 100_000 + long * 700_000
        times.observe(A, delivery((1, short), (2, long), launches=short + long, elapsed_ns=elapsed))
    assert times.per_launch_ns(A, 1) == pytest.approx(100_000, rel=0.1)
    assert times.per_launch_ns(A, 2) == pytest.approx(700_000, rel=0.1)


def test_others_on_the_device_make_stretches_longer_but_not_durations() -> None:
    rng, times = random.Random(2), FunctionTimes()
    for _ in range(300):
        times.observe(A, delivery((1, 10), launches=10, elapsed_ns=10_000 * (1 if rng.random() < 0.5 else 3)))
    assert times.per_launch_ns(A, 1) == pytest.approx(1_000, rel=0.6)
    assert (times.per_launch_ns(A, 1) or 0) < 1_700


def test_durations_that_change_are_followed() -> None:
    times = FunctionTimes()
    for each in [100_000] * 50 + [300_000] * 100 + [60_000] * 30:
        times.observe(A, delivery((1, 4), launches=4, elapsed_ns=4 * each))
    assert times.per_launch_ns(A, 1) == pytest.approx(60_000, rel=0.05)


def test_launches_beyond_those_that_are_listed_share_a_duration() -> None:
    times = FunctionTimes()
    for _ in range(50):
        times.observe(A, delivery((1, 10), launches=40, elapsed_ns=10 * 1_000 + 30 * 5_000))
    estimated = (times.per_launch_ns(A, 1) or 0) * 10 + (times.per_launch_ns(A, OTHER) or 0) * 30
    assert estimated == pytest.approx(160_000, rel=0.01)
    assert times.per_launch_ns(A, 99) == times.per_launch_ns(A, OTHER)


def test_nothing_is_known_of_a_process_that_never_waited_or_was_dropped() -> None:
    times = FunctionTimes()
    assert times.per_launch_ns(A, 1) is None
    assert times.of(A) is None
    times.observe(A, delivery((1, 1), launches=1, elapsed_ns=5))
    times.forget([A])
    assert times.per_launch_ns(A, 1) is None


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 1000)), max_size=8), st.integers(0, 10**11)),
        max_size=30,
    )
)
def test_no_duration_is_ever_negative_or_longer_than_the_longest_stretch(
    stretches: list[tuple[list[tuple[int, int]], int]],
) -> None:
    times = FunctionTimes()
    for functions, elapsed in stretches:
        launches = sum(count for _, count in functions)
        times.observe(A, delivery(*functions, launches=launches, elapsed_ns=elapsed))
    for function in range(10):
        duration = times.per_launch_ns(A, function)
        assert duration is None or 0 <= duration <= max(elapsed for _, elapsed in stretches)
