# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The laws, over any sequence of latencies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import ContainerKey, DeviceUuid
from enforce.controller.laws.headroom import (
    EXHAUSTED_NS,
    FIRST_BACKOFF_NS,
    FUTILE_NS,
    LONGEST_BACKOFF_NS,
    MIN_QUEUED_NS,
    MOST_OF_TARGET,
    TOP_QUEUED_NS,
    Headroom,
    HeadroomState,
)
from enforce.model import OnlineOn, Reading, Share
from enforce.policy.model import Slo

TARGET = 20_000_000
SLO = Slo("gpu_wait", 0.99, TARGET, 10_000_000_000, 20)
HOLD_NS = 2_000_000_000
LAW = Headroom(floor_ratio=0.05, top_queued_ns=TOP_QUEUED_NS, no_data_hold_ns=HOLD_NS)
STEP = 100_000_000
latencies = st.one_of(st.none(), st.floats(1e5, 1e9))
busies = st.one_of(st.none(), st.floats(0, 1))


def online(latency: float | None, now: int, busy: float | None = 0.5) -> OnlineOn:
    reading = None if latency is None else Reading(now, 0.99, latency, 500, latency, latency, 100)
    return OnlineOn(ContainerKey("chat"), DeviceUuid("GPU-0"), SLO, reading, busy)


def play(sequence: list[float | None], state: HeadroomState | None = None, busy: float | None = 0.5) -> list[Share]:
    shares, current = [], state or LAW.start()
    for number, latency in enumerate(sequence):
        current, share = LAW.step(current, online(latency, number * STEP, busy), number * STEP)
        shares.append(share)
    return shares


def close_loop(latency_of: Callable[[Share], float], steps: int) -> list[tuple[HeadroomState, Share, float]]:
    """The law on a device whose latency follows the last decision. One point a decision."""
    state = LAW.start()
    share = Share(state.ratio, int(state.max_queued_ns), "")
    points = []
    for number in range(steps):
        latency = latency_of(share)
        state, share = LAW.step(state, online(latency, number * STEP), number * STEP)
        points.append((state, share, latency))
    return points


@given(st.lists(st.tuples(latencies, busies), max_size=200))
def test_the_share_never_leaves_the_floor_and_the_whole(sequence: list[tuple[float | None, float | None]]) -> None:
    state = LAW.start()
    for number, (latency, busy) in enumerate(sequence):
        state, share = LAW.step(state, online(latency, number * STEP, busy), number * STEP)
        assert LAW.floor_ratio <= share.ratio <= 1.0
        assert MIN_QUEUED_NS <= share.max_queued_ns <= TOP_QUEUED_NS


@given(st.floats(TARGET * 1.001, 1e9))
def test_a_violation_is_answered_at_the_first_decision(latency: float) -> None:
    quiet, violated = play([TARGET * 0.5]), play([latency])
    assert violated[0].max_queued_ns < quiet[0].max_queued_ns or violated[0].ratio < quiet[0].ratio


@given(st.lists(st.floats(1e5, TARGET * 0.9), max_size=100), st.floats(TARGET * 1.001, 1e9))
def test_a_violation_after_any_quiet_time_is_answered_at_once(quiet: list[float], latency: float) -> None:
    before, after = play([*quiet, quiet[-1] if quiet else TARGET * 0.5])[-1], play([*quiet, latency])[-1]
    assert after.max_queued_ns < before.max_queued_ns


def test_a_lasting_violation_that_slowing_helps_ends_at_the_floor_and_asks_for_the_next_rung() -> None:
    points = close_loop(lambda share: TARGET * (1.1 + share.ratio), 400)
    assert points[-1][1].ratio == LAW.floor_ratio
    assert points[-1][1].exhausted
    assert all(share.ratio >= LAW.floor_ratio for _, share, _ in points)


def test_slowing_that_does_not_help_is_given_up_for_twice_as_long_each_time() -> None:
    steps = int((FUTILE_NS + LONGEST_BACKOFF_NS) * 3 / STEP)
    points = close_loop(lambda _share: TARGET * 2.0, steps)
    given_up = [n for n, (_, share, _) in enumerate(points) if "given back" in share.reason]
    assert len(given_up) >= 4
    pauses = [later - earlier for earlier, later in pairwise(given_up)]
    assert all(later > 1.3 * earlier for earlier, later in pairwise(pauses))
    assert points[given_up[0] + 1][1].ratio == 1.0
    assert points[given_up[0] + 1][0].misses.give_up.backoff_ns == 2 * FIRST_BACKOFF_NS


def test_a_worse_violation_is_answered_though_slowing_was_given_up() -> None:
    points = close_loop(lambda _share: TARGET * 2.0, 400)
    number = next(n for n, (_, share, _) in enumerate(points) if "given back" in share.reason)
    state, before, _ = points[number]
    _, after = LAW.step(state, online(TARGET * 3.0, (number + 1) * STEP), (number + 1) * STEP)
    assert after.max_queued_ns < before.max_queued_ns


def test_the_next_rung_is_not_asked_for_at_once() -> None:
    points = close_loop(lambda share: TARGET * (1.1 + share.ratio), 400)
    at_floor = next(
        n
        for n, (state, _, _) in enumerate(points)
        if state.misses.miss and state.misses.miss.floor_since_ns is not None
    )
    asked = next(n for n, (_, share, _) in enumerate(points) if share.exhausted)
    assert (asked - at_floor) * STEP >= EXHAUSTED_NS


def test_lasting_slack_gives_everything_back_that_it_allows() -> None:
    last = play([TARGET * 0.5] * 5000, HeadroomState(0.05, MIN_QUEUED_NS))[-1]
    assert last.ratio == 1.0
    assert last.max_queued_ns == int(TARGET * MOST_OF_TARGET)


def test_little_slack_is_spent_up_to_what_the_load_leaves_of_it() -> None:
    last = play([TARGET * 0.84] * 5000, HeadroomState(0.05, MIN_QUEUED_NS))[-1]
    assert last.max_queued_ns == int(TARGET * 0.08)  # a load of one half


def test_the_busier_the_online_side_the_shorter_the_queue() -> None:
    assert play([TARGET * 0.84] * 2000, busy=0.8)[-1].max_queued_ns < play([TARGET * 0.84] * 2000)[-1].max_queued_ns


def test_a_queue_that_is_far_too_long_for_the_slack_is_shortened_before_the_target_is_missed() -> None:
    shares = play([TARGET * 0.9] * 200, HeadroomState(1.0, 10 * TARGET))
    assert shares[-1].max_queued_ns < TARGET
    assert not any("missed" in share.reason for share in shares)


def test_within_the_dead_band_nothing_moves() -> None:
    assert len({(share.ratio, share.max_queued_ns) for share in play([TARGET * 0.95] * 100)}) == 1


def test_close_below_the_target_the_queue_gets_shorter_before_it_is_missed() -> None:
    shares = play([TARGET * 0.98] * 200, HeadroomState(1.0, TARGET / 2))
    assert shares[-1].max_queued_ns < TARGET / 4
    assert not any("missed" in share.reason for share in shares)


def test_a_miss_right_after_the_queue_got_shorter_is_answered_at_once() -> None:
    trimmed, missed = play([TARGET * 0.98, TARGET * 1.5], HeadroomState(1.0, TARGET / 2))
    assert missed.max_queued_ns < trimmed.max_queued_ns
    assert "missed" in missed.reason


def test_nothing_grows_while_the_online_side_keeps_the_device_busy() -> None:
    shares = play([TARGET * 0.5] * 100, busy=0.9)
    assert len({share.max_queued_ns for share in shares}) == 1


@settings(max_examples=50)
@given(st.floats(0.3, 0.9), st.floats(0.2, 1.5))
def test_a_constant_load_is_held_under_its_target_without_swinging(alone: float, gain: float) -> None:
    """Latency = alone + gain × queue, as when an online request waits for what is queued."""
    points = close_loop(lambda share: TARGET * alone + gain * share.ratio * share.max_queued_ns, 1500)[-300:]
    latencies = [latency for _, _, latency in points]
    fits = TARGET * alone + gain * MIN_QUEUED_NS < TARGET
    if fits:
        assert max(latencies) <= TARGET
        assert max(latencies) - min(latencies) <= 0.05 * TARGET
        assert min(share.ratio for _, share, _ in points) == 1.0


def test_silence_is_held_and_then_released() -> None:
    held = HeadroomState(0.2, MIN_QUEUED_NS, last_reading_ns=0)
    _, soon = LAW.step(held, online(None, HOLD_NS - 1), HOLD_NS - 1)
    _, late = LAW.step(held, online(None, HOLD_NS + 1), HOLD_NS + 1)
    assert soon.ratio == 0.2
    assert late.ratio == 1.0


def test_the_policys_bound_of_the_queue_holds_even_below_the_shortest() -> None:
    law = Headroom(floor_ratio=0.05, top_queued_ns=100_000, no_data_hold_ns=HOLD_NS)
    state = law.start()
    for number in range(100):
        state, share = law.step(state, online(TARGET * (2.0 if number % 3 else 0.5), number * STEP), number * STEP)
        assert share.max_queued_ns <= 100_000


def test_one_burst_in_a_long_window_is_punished_once_and_not_each_second() -> None:
    """Five requests a second, so that only the window of 30 s can judge, and remembers the burst for as long."""
    slo = Slo("gpu_wait", 0.99, TARGET, 30_000_000_000, 20)
    state, shares = LAW.start(), []
    for number in range(400):
        latency = TARGET * (3.0 if 10 <= number < 310 else 0.5)
        reading = Reading(number * STEP, 0.99, latency, 150, None, None, 5)
        one = OnlineOn(ContainerKey("chat"), DeviceUuid("GPU-0"), slo, reading, 0.1)
        state, share = LAW.step(state, one, number * STEP)
        shares.append(share)
    assert min(share.ratio for share in shares) == 1.0
    assert not any(share.exhausted or "given back" in share.reason for share in shares)
    assert shares[10].max_queued_ns < shares[9].max_queued_ns
