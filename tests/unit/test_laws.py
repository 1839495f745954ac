# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The laws, over any sequence of latencies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from enforce.laws.headroom import MIN_QUEUED_NS, TOP_QUEUED_NS, Headroom, State
from enforce.model import Reading, Share
from enforce.policy.model import Slo

TARGET = 5_000_000
SLO = Slo("gpu_wait", 0.99, TARGET, 10_000_000_000, 20)
LAW = Headroom(floor_ratio=0.05, top_queued_ns=TOP_QUEUED_NS, no_data_hold_ns=2_000_000_000)
STEP = 100_000_000
latencies = st.one_of(st.none(), st.floats(1e5, 1e9))


def reading(latency: float | None, now: int) -> Reading | None:
    return None if latency is None else Reading(now, 0.99, latency, 500, latency, latency, 100)


def play(sequence: list[float | None], state: State | None = None) -> list[Share]:
    shares, current = [], state or LAW.start()
    for number, latency in enumerate(sequence):
        now = number * STEP
        current, share = LAW.step(current, reading(latency, now), SLO, now)
        shares.append(share)
    return shares


@given(st.lists(latencies, max_size=200))
def test_the_share_never_leaves_the_floor_and_the_whole(sequence: list[float | None]) -> None:
    for share in play(sequence):
        assert LAW.floor_ratio <= share.ratio <= 1.0
        assert MIN_QUEUED_NS <= share.max_queued_ns <= TOP_QUEUED_NS


@given(st.floats(TARGET * 1.001, 1e9))
def test_a_violation_is_answered_at_the_first_decision(latency: float) -> None:
    quiet, violated = play([TARGET * 0.5]), play([latency])
    assert violated[0].max_queued_ns < quiet[0].max_queued_ns or violated[0].ratio < quiet[0].ratio


def test_a_lasting_violation_ends_at_the_floor_and_not_below() -> None:
    assert play([TARGET * 10.0] * 1000)[-1].ratio == LAW.floor_ratio


def test_lasting_slack_gives_everything_back() -> None:
    last = play([TARGET * 0.5] * 5000, State(0.05, MIN_QUEUED_NS))[-1]
    assert last.ratio == 1.0
    assert last.max_queued_ns == TOP_QUEUED_NS


def test_within_the_dead_band_nothing_moves() -> None:
    assert len({(share.ratio, share.max_queued_ns) for share in play([TARGET * 0.94] * 100)}) == 1


def test_without_data_it_holds_and_then_releases() -> None:
    shares = play([TARGET * 3.0] * 40 + [None] * 60)
    held, released = shares[45], shares[-1]
    assert held == shares[39] or held.ratio == shares[39].ratio
    assert released.ratio == 1.0


def test_it_protects_faster_than_it_gives_back() -> None:
    down = next(i for i, share in enumerate(play([TARGET * 2.0] * 500)) if share.ratio < 0.5)
    up = next(
        i for i, share in enumerate(play([TARGET * 0.5] * 5000, State(0.05, MIN_QUEUED_NS))) if share.ratio > 0.95
    )
    assert down < up
