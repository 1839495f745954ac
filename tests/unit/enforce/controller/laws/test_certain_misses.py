# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""With the shortest queue a certain miss is answered at once, any other is watched first; neither makes it swing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import ContainerKey, DeviceUuid
from enforce.controller.laws.headroom import (
    BELOW_CEILING,
    FIRST_BACKOFF_NS,
    FIRST_CEILING_NS,
    MIN_QUEUED_NS,
    SECOND_NS,
    TOP_QUEUED_NS,
    Headroom,
    HeadroomState,
    Miss,
    Misses,
)
from enforce.model import OnlineOn, Reading, Share
from enforce.policy.model import Slo
from enforce.signals.latency_window import Window
from tests.support.kernel_records import Recorded

TARGET = 20_000_000
SLO = Slo("gpu_wait", 0.99, TARGET, 10 * SECOND_NS, 20)
LAW = Headroom(floor_ratio=0.05, top_queued_ns=TOP_QUEUED_NS, no_data_hold_ns=2 * SECOND_NS)
SHORTEST = HeadroomState(1.0, MIN_QUEUED_NS)
STEP = 100_000_000
A_SECOND = 10  # decisions


def online(latency: float, now: int, certain: float | None = None) -> OnlineOn:
    reading = Reading(now, 0.99, latency, 500, latency, latency, 100, certain_ns=certain)
    return OnlineOn(ContainerKey("chat"), DeviceUuid("GPU-0"), SLO, reading, 0.5)


def play(sequence: list[tuple[float, bool]], state: HeadroomState = SHORTEST) -> list[Share]:
    """Latency, and whether a miss of it is certain, one decision each."""
    shares = []
    for number, (latency, certain) in enumerate(sequence):
        one = online(latency, number * STEP, latency if certain else None)
        state, share = LAW.step(state, one, number * STEP)
        shares.append(share)
    return shares


def measured(latency_of: Callable[[Share], float], seconds: int) -> list[Share]:
    """The law on a device whose latency follows the last decision, read by a real window: 10 requests a decision.

    Before that, half a second of requests that are close below the target. The queue is always the shortest.
    """
    law = replace(LAW, top_queued_ns=MIN_QUEUED_NS)
    window, counter, state, share = Window(SLO.window_ns), Recorded(), SHORTEST, Share(1.0, MIN_QUEUED_NS, "")
    window.take({"one": counter.buckets}, 0)
    shares = []
    for number in range(1, seconds * A_SECOND):
        counter.add([int(latency_of(share) if number > 5 else TARGET * 0.95)] * 10)
        window.take({"one": counter.buckets}, number * STEP)
        one = replace(online(0, 0), reading=window.reading(SLO, number * STEP))
        state, share = law.step(state, one, number * STEP)
        shares.append(share)
    return shares


def rises(shares: list[Share]) -> int:
    return sum(after.ratio > before.ratio for before, after in pairwise(shares))


def turns(shares: list[Share]) -> int:
    """How often the share went the other way than before."""
    moves = [after.ratio - before.ratio for before, after in pairwise(shares) if after.ratio != before.ratio]
    return sum((one > 0) != (other > 0) for one, other in pairwise(moves))


@given(st.floats(TARGET * 1.001, 1e9))
def test_the_first_certain_miss_with_the_shortest_queue_cuts_the_share_at_once(latency: float) -> None:
    (share,) = play([(latency, True)])
    assert share.ratio < 1.0
    assert "smaller share" in share.reason


@given(st.floats(TARGET * 1.001, 1e9), st.integers(1, A_SECOND))
def test_a_miss_that_becomes_certain_while_it_is_watched_is_answered_then(latency: float, after: int) -> None:
    shares = play([*[(latency, False)] * after, (latency, True)])
    assert [share.ratio for share in shares[:-1]] == [1.0] * after
    assert shares[-1].ratio < 1.0


@given(st.lists(st.floats(TARGET * 1.001, 1e9), min_size=1, max_size=A_SECOND), st.floats(1e5, TARGET))
def test_a_miss_that_is_neither_certain_nor_lasts_costs_no_share(missed: list[float], kept: float) -> None:
    sequence = [*((latency, False) for latency in missed), *[(kept, False)] * 3 * A_SECOND]
    assert {share.ratio for share in play(sequence)} == {1.0}


@given(st.lists(st.tuples(st.floats(1e5, 1e8), st.booleans()), max_size=150))
def test_the_share_is_never_cut_but_for_a_miss_that_is_certain_or_was_watched_for_a_second(
    sequence: list[tuple[float, bool]],
) -> None:
    state, watched_ns = SHORTEST, None
    for number, (latency, certain) in enumerate(sequence):
        now = number * STEP
        before = state
        state, share = LAW.step(state, online(latency, now, latency if certain else None), now)
        if before.misses.miss is None and state.misses.miss is not None:
            watched_ns = now
        if share.ratio < before.ratio and before.ratio == 1.0:
            lasted = watched_ns is not None and now - watched_ns >= SECOND_NS
            assert latency > TARGET
            assert certain or lasted


def test_a_certain_miss_that_is_only_remembered_is_not_answered_again() -> None:
    state, first = LAW.step(SHORTEST, online(TARGET * 1.5, 0, TARGET * 1.5), 0)
    shares = []
    for number in range(1, 100):
        one = online(TARGET * 1.5, number * STEP, TARGET * 1.5)
        assert one.reading is not None
        mended = replace(one, reading=replace(one.reading, recent_ns=TARGET * 0.5, recent_low_ns=TARGET * 0.5))
        state, share = LAW.step(state, mended, number * STEP)
        shares.append(share)
    assert {share.ratio for share in shares} == {first.ratio}


@given(st.floats(TARGET * 1.001, 1e9), st.booleans())
def test_under_a_constant_miss_the_share_falls_to_the_floor_and_rises_only_where_it_is_given_back(
    latency: float, certain: bool
) -> None:
    shares = play([(latency, certain)] * (300 * A_SECOND))
    given_back = [share for share in shares if "given back" in share.reason]
    assert rises(shares) == len(given_back)
    assert 1 <= len(given_back) <= 300 * SECOND_NS // FIRST_BACKOFF_NS  # it doubles
    assert min(share.ratio for share in shares) == LAW.floor_ratio


@settings(max_examples=25, deadline=None)
@given(st.floats(0.2, 0.95), st.floats(0.2, 3.0))
def test_a_load_that_a_smaller_share_mends_is_found_without_swinging(alone: float, gain: float) -> None:
    """Latency = alone + gain × share: it is missed with the shortest queue, until the share is small enough."""
    shares = measured(lambda share: TARGET * (alone + gain * share.ratio), 120)
    cycles = 1 + math.log2(1 + 120 * SECOND_NS / FIRST_CEILING_NS)  # each waits twice as long as the one before
    assert turns(shares) <= 2 * cycles


def test_a_real_window_makes_a_miss_of_all_requests_certain_within_half_a_second() -> None:
    shares = measured(lambda _share: TARGET * 2.0, 5)
    began = next(number for number, share in enumerate(shares) if "missed" in share.reason)
    cut = next(number for number, share in enumerate(shares) if share.ratio < 1.0)
    assert cut - began < A_SECOND // 2


def test_a_watched_miss_does_not_let_the_queue_grow() -> None:
    state = replace(SHORTEST, at_ns=0, misses=Misses(Miss(0, TARGET * 1.1, watched_until_ns=SECOND_NS)))
    _, watched = LAW.step(state, online(TARGET * 0.2, STEP), STEP)
    _, after = LAW.step(state, online(TARGET * 0.2, 2 * SECOND_NS), 2 * SECOND_NS)
    assert watched.max_queued_ns == MIN_QUEUED_NS < after.max_queued_ns


def test_a_share_that_was_too_much_is_tried_again_later_and_then_for_good() -> None:
    kept, missed = (TARGET * 0.5, False), (TARGET * 1.5, True)
    shares = play([missed, *[kept] * (60 * A_SECOND)])
    within = FIRST_CEILING_NS // STEP
    assert max(share.ratio for share in shares[:within]) <= BELOW_CEILING
    assert shares[-1].ratio == 1.0
