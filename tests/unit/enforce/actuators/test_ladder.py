# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The ladder, over any sequence of good and bad moments."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from enforce.actuators.ladder import (
    CLIMB_AFTER_NS,
    EVICT_AFTER_NS,
    HOLD_NS,
    MOST_HOLD_NS,
    STEPS,
    LadderState,
    advance,
    merged,
    strongest,
)

STEP_NS = 100_000_000
LADDERS = st.lists(st.sampled_from(["gate", "pace", "mps", "deny", *STEPS]), min_size=1, max_size=8, unique=True)
MOMENTS = st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=30)  # exhausted, for how many decisions
WISHES = st.lists(st.dictionaries(st.sampled_from([*STEPS, "mps", "deny"]), st.text(max_size=3)), max_size=4)


def play(
    ladder: list[str], moments: list[tuple[bool, int]], unable: frozenset[str] = frozenset()
) -> list[tuple[int, bool, LadderState]]:
    """(when, exhausted, where it stands after this decision)."""
    state, now, states = LadderState(), 0, []
    for exhausted, count in moments:
        for _ in range(count):
            now += STEP_NS
            state = advance(state, ladder, exhausted, lambda step: step not in unable, now)
            states.append((now, exhausted, state))
    return states


def height(state: LadderState) -> int:
    return 0 if state.step is None else STEPS.index(state.step) + 1


@given(LADDERS, MOMENTS, st.frozensets(st.sampled_from(STEPS)))
def test_never_a_step_that_the_rule_does_not_list_or_that_cannot_be_done(
    ladder: list[str], moments: list[tuple[bool, int]], unable: frozenset[str]
) -> None:
    before = LadderState()
    for _, _, state in play(ladder, moments, unable):
        assert state.step is None or state.step in ladder
        assert height(state) <= height(before) or state.step not in unable
        before = state


@given(LADDERS, MOMENTS)
def test_up_only_in_bad_moments_and_down_only_in_good_ones(ladder: list[str], moments: list[tuple[bool, int]]) -> None:
    for (_, _, before), (_, exhausted, after) in pairwise(play(ladder, moments)):
        if exhausted:
            assert height(after) >= height(before)
        else:
            assert height(after) <= height(before)


@given(LADDERS, MOMENTS)
def test_at_most_one_step_in_its_time(ladder: list[str], moments: list[tuple[bool, int]]) -> None:
    last_ns = 0
    steps: list[str | None] = [None, *(step for step in STEPS if step in ladder)]
    for (_, _, before), (now, exhausted, after) in pairwise([(0, False, LadderState()), *play(ladder, moments)]):
        if before.step == after.step:
            continue
        assert now - last_ns >= (CLIMB_AFTER_NS if exhausted else before.hold_ns)
        rank = steps.index(before.step) - steps.index(after.step)
        assert abs(rank) == 1
        last_ns = now


@given(LADDERS, MOMENTS)
def test_lasting_slack_leads_down_to_the_ground(ladder: list[str], moments: list[tuple[bool, int]]) -> None:
    states = play(ladder, moments)
    now, state = (states[-1][0], states[-1][2]) if states else (0, LadderState())
    end = now + (len(STEPS) + 1) * (MOST_HOLD_NS + STEP_NS)
    while now < end and state.step is not None:
        now += STEP_NS * 50
        state = advance(state, ladder, False, lambda _: True, now)
    assert state.step is None


def test_a_short_miss_leads_nowhere() -> None:
    short = (True, CLIMB_AFTER_NS // STEP_NS - 1)
    assert play(["freeze"], [short, (False, 1)] * 20)[-1][2].step is None


def test_each_relapse_doubles_the_hold_up_to_a_bound() -> None:
    state, now, holds = LadderState(), 0, []
    for _ in range(10):
        while state.step is None:
            now += STEP_NS
            state = advance(state, ["freeze"], True, lambda _: True, now)
        holds.append(state.hold_ns)
        while state.step is not None:
            now += STEP_NS
            state = advance(state, ["freeze"], False, lambda _: True, now)
    assert holds[:3] == [HOLD_NS, 2 * HOLD_NS, 4 * HOLD_NS]
    assert holds[-1] == MOST_HOLD_NS


def test_a_relapse_after_a_long_calm_is_none() -> None:
    state = LadderState(hold_ns=8 * HOLD_NS, came_down_ns=0)
    now = MOST_HOLD_NS + 1
    state = advance(state, ["freeze"], True, lambda _: True, now)
    state = advance(state, ["freeze"], True, lambda _: True, now + CLIMB_AFTER_NS)
    assert (state.step, state.hold_ns) == ("freeze", HOLD_NS)


def test_eviction_waits_longer_than_everything_that_can_be_taken_back() -> None:
    states = play(["freeze", "evict"], [(True, 1000)])
    at = {step: next(now for now, _, state in states if state.step == step) for step in ("freeze", "evict")}
    assert at["evict"] - at["freeze"] >= EVICT_AFTER_NS


def test_what_cannot_be_done_is_passed_over() -> None:
    steps = {state.step for _, _, state in play(["freeze", "lock"], [(True, 200)], frozenset({"freeze"}))}
    assert steps == {None, "lock"}


@given(LADDERS, WISHES)
def test_of_all_wishes_only_what_the_rule_lists_and_of_the_steps_only_the_strongest(
    ladder: list[str], wishes: list[dict[str, str]]
) -> None:
    wanted = merged(ladder, wishes)
    asked = {rung for wish in wishes for rung in wish if rung in ladder}
    strongest = {
        step for step in STEPS if step in asked and not any(s in asked for s in STEPS[STEPS.index(step) + 1 :])
    }
    assert wanted.keys() == (asked - set(STEPS)) | strongest
    for rung, reason in wanted.items():
        assert reason == next(wish[rung] for wish in wishes if rung in wish)


def test_the_strongest_is_the_last_that_the_rule_lists() -> None:
    assert strongest(("evict", "pace", "swap")) == "evict"
    assert strongest(("gate", "freeze", "lock")) == "lock"
    assert strongest(("gate", "pace", "mps")) is None
