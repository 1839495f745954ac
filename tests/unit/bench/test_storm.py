# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The acts of a storm come from its seed alone, and its figures say what was seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.storm.acts import MOST_DELAY_SECONDS, WEIGHTS, Act, Blow, Kind, Moment, Shortage, Victims, plan
from bench.storm.figures import INVARIANTS, Outcome, histogram, holds, quantile, rows, summary, verdicts
from bench.storm.observe import Trace
from bench.storm.workloads import RUNGS, Standing, policy
from enforce.policy.load import parse

KILL_AGENT, KILL_BOTH = Kind(Blow.KILL, Victims.AGENT), Kind(Blow.KILL, Victims.BOTH)


def outcome(kind: Kind, stood_ms: float, met: int = 1, skipped: str = "") -> Outcome:
    return Outcome(Act(0, kind, Moment.STEADY, 0.1, 0.5), met=met, stood_ms=stood_ms, skipped=skipped)


@given(st.integers(0, 1 << 32), st.integers(0, 50))
def test_a_seed_gives_the_same_acts_and_a_longer_storm_begins_like_a_shorter_one(seed: int, kills: int) -> None:
    acts = plan(kills, seed)
    assert acts == plan(kills + 5, seed)[:kills]
    for act in acts:
        assert act.moment in WEIGHTS[act.kind][1]
        assert 0 <= act.delay_seconds <= MOST_DELAY_SECONDS[act.moment]


def test_a_thousand_acts_are_of_every_kind_and_at_every_moment() -> None:
    acts = plan(1000, 1)
    assert {act.kind for act in acts} == set(WEIGHTS)
    assert {act.moment for act in acts} == set(Moment)


def test_a_storm_can_be_of_one_kind() -> None:
    assert {act.kind for act in plan(20, 1, ["kill both, no disk"])} == {Kind(Blow.KILL, Victims.BOTH, Shortage.DISK)}


@given(st.lists(st.floats(0, 1e4), min_size=1), st.floats(0.01, 1))
def test_so_many_values_do_not_exceed_a_quantile(values: list[float], ratio: float) -> None:
    found = quantile(values, ratio)
    assert found in values
    assert sum(value <= found for value in values) >= ratio * len(values) - 1e-9


@given(st.lists(st.floats(0, 1e5)))
def test_a_histogram_has_every_value_once(values: list[float]) -> None:
    assert sum(histogram(values).values()) == len(values)


def test_a_workload_that_stands_again_counts_until_the_last_time_where_nobody_enforces() -> None:
    trace = Trace(met={"a": Standing.STOPPED}, standing={"a": Standing.STOPPED})
    trace.note(0.01, {})
    trace.note(0.02, {"a": Standing.STOPPED, "b": Standing.STOPPED})
    trace.note(0.05, {"b": Standing.STOPPED})
    trace.note(0.07, {})
    assert trace.stood_seconds(enforced=False) == 0.07
    assert trace.ran == {"a": 0.01, "b": 0.07}


def test_only_acts_that_met_a_standing_workload_are_in_the_times_and_shortages_have_no_goal() -> None:
    outcomes = [
        outcome(KILL_AGENT, 20),
        outcome(KILL_AGENT, 0, met=0),
        outcome(KILL_BOTH, 600),
        outcome(Kind(Blow.KILL, Victims.BOTH, Shortage.DISK), 5000),
        outcome(KILL_AGENT, 9999, skipped="no memory controller"),
    ]
    one_dead, both_dead, both_still = verdicts(outcomes, 2.0)
    assert (one_dead["seen_ms"], one_dead["reached"]) == (20, True)
    assert (both_dead["seen_ms"], both_dead["reached"]) == (600, False)
    assert (both_still["most_ms"], both_still["reached"]) == (3000, None)
    assert [row["met_standing"] for row in rows(outcomes)] == [1, 1, 1]


def test_a_storm_that_broke_nothing_holds_and_one_that_did_nothing_does_not() -> None:
    one = outcome(KILL_AGENT, 900)
    assert holds(summary([one], {}, 2.0))
    assert not holds(summary([], {}, 2.0))
    one.breaks("left_stopped", "gated 7")
    assert summary([one], {"left_stopped": 2}, 2.0)["left_stopped"] == 3
    assert not holds(summary([one], {}, 2.0))
    assert not holds(summary([outcome(KILL_AGENT, 1)], {INVARIANTS[-1]: 1}, 2.0))


def test_the_policy_of_a_storm_has_a_rule_for_each_rung() -> None:
    found = parse(policy("/storm", "1ms"), "policy.yaml")
    assert [rule.name for rule in found.offline] == [rung.name for rung in RUNGS]
    assert {rung for rule in found.offline for rung in rule.ladder} == {
        *("gate", "pace", "freeze", "lock", "swap", "hold", "deny")
    }
