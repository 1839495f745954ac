# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Durations learned from activity and launch counts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.delivery import BusyTimes, LaunchTimes, delivered_ns
from agent.durations import SmTimes, Tick, solve
from agent.model import ProcessId
from agent.occupancy import sm_fraction
from agent.samples import Delivered

A, B = (ProcessId(10, 1), 0xA), (ProcessId(11, 1), 0xB)


def test_two_functions_whose_mix_varies_are_told_apart() -> None:
    rng = random.Random(1)
    times = SmTimes()
    for _ in range(60):
        launches = {A: rng.randrange(0, 2000), B: rng.randrange(0, 500)}
        times.observe(Tick(launches[A] * 200_000 + launches[B] * 900_000, launches), {})
    assert times.sm_ns(A) == pytest.approx(200_000, rel=0.05)
    assert times.sm_ns(B) == pytest.approx(900_000, rel=0.05)


def test_without_variety_the_priors_decide_how_it_is_split() -> None:
    ticks = tuple(Tick(1000 * 300.0 + 1000 * 100.0, {A: 1000, B: 1000}) for _ in range(20))
    solved = solve(ticks, {A: 0.0, B: 0.0}, {A: 300.0, B: 100.0})
    assert solved[A] / solved[B] == pytest.approx(3, rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 5000), st.integers(0, 5000)), min_size=1, max_size=20))
def test_no_duration_is_ever_negative(rows: list[tuple[float, int, int]]) -> None:
    solved = solve(tuple(Tick(sm, {A: a, B: b}) for sm, a, b in rows), {A: 0.0, B: 0.0}, {A: 0.0, B: 0.0})
    assert all(value >= 0 for value in solved.values())


def delivery(**values: int) -> Delivered:
    fields = dict.fromkeys(
        (
            "at_ns",
            "launches",
            "charged_ns",
            "queued_ns",
            "waited_ns",
            "waited_busy_ns",
            "elapsed_ns",
            "elapsed_busy_ns",
            "pauses",
        ),
        0,
    )
    return Delivered(process=A[0], **{**fields, **values})


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
    assert times.per_launch_ns(A[0]) == 100


def test_a_process_that_never_waited_has_no_duration() -> None:
    assert LaunchTimes().per_launch_ns(A[0]) is None


@pytest.mark.parametrize(
    ("blocks", "threads", "fraction"),
    [(66, 1024, 0.5), (132, 1024, 1.0), (264, 1024, 1.0), (264 + 132, 1024, 1.0), (264 + 66, 1024, 0.75), (0, 1, 1.0)],
)
def test_a_launch_keeps_as_many_sms_busy_as_it_has_blocks_for(blocks: int, threads: int, fraction: float) -> None:
    assert sm_fraction(blocks, threads, 132) == pytest.approx(fraction)


def test_busy_time_over_launches_needs_a_few_ticks_and_skips_missing_samples() -> None:
    times = BusyTimes()
    for busy in (500.0, None, 700.0):
        times.observe(A[0], 10, busy)
    assert times.per_launch_ns(A[0]) is None
    times.observe(A[0], 10, 600.0)
    assert times.per_launch_ns(A[0]) == 60
