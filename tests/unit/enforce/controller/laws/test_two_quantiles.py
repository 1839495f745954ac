# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An SLO with two quantiles: offline work gets what the stricter one leaves, whatever the other one's trouble is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.model import ContainerKey, DeviceUuid
from enforce.controller.laws.headroom import (
    MIN_QUEUED_NS,
    MOST_OF_TARGET,
    SECOND_NS,
    TOP_QUEUED_NS,
    Headroom,
    HeadroomState,
)
from enforce.model import OnlineOn, Reading, Share
from enforce.policy.model import Slo

P99, P50 = 50_000_000, 8_000_000  # targets
ALSO = Slo("gpu_wait", 0.5, P50, 10 * SECOND_NS, 20)
SLO = replace(ALSO, quantile=0.99, target_ns=P99, also=ALSO)
LAW = Headroom(floor_ratio=0.05, top_queued_ns=TOP_QUEUED_NS, no_data_hold_ns=2 * SECOND_NS)
STEP = 100_000_000
ratios = st.floats(0.01, 5.0)  # of the targets
Ratios = tuple[float, float]


def online(of_targets: Ratios | None, now: int) -> OnlineOn:
    """A reading of both quantiles, as ratios of their targets. Neither is certain of a whole window."""
    first = second = None
    if of_targets is not None:
        high, low = of_targets[0] * P99, of_targets[1] * P50
        second = Reading(now, 0.5, low, 500, low, low, 100)
        first = Reading(now, 0.99, high, 500, high, high, 100, also=second)
    return OnlineOn(ContainerKey("chat"), DeviceUuid("GPU-0"), SLO, first, 0.5)


def play(sequence: list[Ratios | None], state: HeadroomState | None = None) -> list[Share]:
    shares, current = [], state or LAW.start()
    for number, of_targets in enumerate(sequence):
        current, share = LAW.step(current, online(of_targets, number * STEP), number * STEP)
        shares.append(share)
    return shares


def close_loop(latencies: Callable[[Share], Ratios], seconds: int) -> list[Share]:
    state, shares = LAW.start(), []
    share = Share(state.ratio, int(state.max_queued_ns), "")
    for number in range(seconds * 10):
        state, share = LAW.step(state, online(latencies(share), number * STEP), number * STEP)
        shares.append(share)
    return shares


@given(st.lists(st.one_of(st.none(), st.tuples(ratios, ratios)), max_size=60))
def test_no_more_is_left_than_either_quantile_alone_would_leave_from_there(sequence: list[Ratios | None]) -> None:
    state = LAW.start()
    for number, of_targets in enumerate(sequence):
        now, both = number * STEP, online(of_targets, number * STEP)
        first, second = both.by_quantile()
        alone = [
            LAW.step(state, first, now)[1],
            LAW.step(replace(state, misses=state.also), second, now)[1],
        ]
        given_up = any("slowing" in share.reason for share in alone)  # that one binds nothing
        state, share = LAW.step(state, both, now)
        assert LAW.floor_ratio <= share.ratio <= 1.0
        if not given_up:
            assert share.ratio == min(one.ratio for one in alone)
            assert share.max_queued_ns == min(one.max_queued_ns for one in alone)


@pytest.mark.parametrize(("of_targets", "binding"), [((0.3, 1.5), 0.5), ((1.5, 0.3), 0.99), ((1.2, 1.5), 0.5)])
def test_the_share_names_the_quantile_that_bound_it(of_targets: Ratios, binding: float) -> None:
    shares = play([of_targets] * 40)
    assert {share.quantile for share in shares if "missed" in share.reason} == {binding}
    assert shares[-1].ratio < 1.0


def test_a_median_close_to_its_target_keeps_the_queue_short_though_the_tail_has_room() -> None:
    assert play([(0.3, 0.5)] * 3000)[-1].max_queued_ns == int(MOST_OF_TARGET * P50)
    assert play([(0.3, 0.95)] * 3000)[-1].max_queued_ns <= LAW.start().max_queued_ns


@given(st.floats(0.01, 0.8), st.floats(0.01, 0.8))
def test_an_slo_that_is_kept_in_both_gives_everything_back(high: float, low: float) -> None:
    assert play([(high, low)] * 600, HeadroomState(0.05, MIN_QUEUED_NS))[-1].ratio == 1.0


def test_one_quantile_that_slowing_does_not_help_does_not_end_the_protection_of_the_other() -> None:
    """The tail is the online side's own; the median is kept only with less than half of the device."""
    shares = close_loop(lambda share: (2.0, 0.5 + share.ratio), 120)
    given_back = next(number for number, share in enumerate(shares) if share.quantile == 0.5)
    assert shares[given_back - 1].ratio == LAW.floor_ratio
    later = shares[given_back:]
    assert max(share.ratio for share in later) <= 0.5
    assert any(share.quantile == 0.5 and share.ratio > 0.4 for share in later)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 0.9), st.floats(0.2, 0.9), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_constant_load_ends_with_both_quantiles_kept_wherever_the_floor_keeps_them(
    high: float, low: float, tail: float, middle: float
) -> None:
    def latencies(share: Share) -> Ratios:
        return high + tail * share.ratio, low + middle * share.ratio

    last = close_loop(latencies, 120)[-1]
    fits = all(ratio < 0.9 for ratio in latencies(replace(last, ratio=LAW.floor_ratio)))
    assert not fits or max(latencies(last)) <= 1.0


def test_an_slo_with_one_quantile_is_answered_as_before() -> None:
    shares = play([(0.3, 3.0)] * 10)
    state, alone = LAW.start(), []
    for number in range(10):
        (one, _) = online((0.3, 3.0), number * STEP).by_quantile()
        state, share = LAW.step(state, one, number * STEP)
        alone.append(share)
    assert {share.quantile for share in alone} == {0.99}
    assert alone[-1].max_queued_ns > shares[-1].max_queued_ns
