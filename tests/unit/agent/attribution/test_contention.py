# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What processes that run side by side get of what they could use."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.contention import SmDemand, fit_to_activity, shares_in_turns, shares_side_by_side

demands = st.dictionaries(
    st.integers(0, 40),
    st.builds(SmDemand, st.floats(0.001, 1), st.floats(0.01, 1), st.floats(1_000, 1e7)),
    max_size=20,
)


def test_a_process_alone_gets_all() -> None:
    assert shares_side_by_side({"a": SmDemand(0.7, 1.0, 5e5)}) == {"a": pytest.approx(1)}


def test_two_that_fit_beside_each_other_get_all() -> None:
    both = {"a": SmDemand(1.0, 0.4, 5e5), "b": SmDemand(1.0, 0.5, 5e4)}
    assert shares_side_by_side(both) == {"a": pytest.approx(1), "b": pytest.approx(1)}


def test_two_alike_that_want_everything_get_a_half_each() -> None:
    parts = shares_side_by_side({"a": SmDemand(1.0, 1.0, 5e5), "b": SmDemand(1.0, 1.0, 5e5)})
    assert parts == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}


def test_long_kernels_get_more_of_what_they_want_than_short_ones() -> None:
    parts = shares_side_by_side({"long": SmDemand(0.9, 1.0, 1e6), "short": SmDemand(0.9, 1.0, 1e5)})
    assert parts["long"] > 1.5 * parts["short"]


def test_a_process_that_rarely_overlaps_with_another_loses_little() -> None:
    parts = shares_side_by_side({"a": SmDemand(0.5, 1.0, 5e5), "b": SmDemand(0.01, 1.0, 5e5)})
    assert parts["a"] > 0.99
    assert parts["b"] < 0.8


@given(demands, st.floats(0, 1.2))
def test_no_process_gets_more_than_it_wants_and_all_together_no_more_than_there_was(
    wanted: dict[int, SmDemand], activity: float
) -> None:
    parts = fit_to_activity(wanted, wanted.keys(), wanted.keys(), activity)
    assert parts.keys() == wanted.keys()
    assert all(0 <= part <= 1 + 1e-9 for part in parts.values())


@given(demands, st.floats(0.01, 1))
def test_those_that_take_turns_are_cut_alike(wanted: dict[int, SmDemand], activity: float) -> None:
    parts = fit_to_activity(wanted, (), wanted.keys(), activity)
    total = sum(one.time * one.sms for one in wanted.values())
    assert all(part == pytest.approx(min(1.0, activity / total)) for part in parts.values())


@given(st.dictionaries(st.integers(0, 40), st.floats(0, 1), max_size=20))
def test_a_process_that_takes_turns_has_no_more_than_it_waited_and_all_no_more_than_there_is(
    opens: dict[int, float],
) -> None:
    turns = shares_in_turns(opens)
    assert all(0 <= turns[key] <= time + 1e-9 for key, time in opens.items())
    if len(opens) <= 8:  # beyond that a bound is taken for the sum over the processes that have work
        any_open = 1 - math.prod(1 - time for time in opens.values())
        assert sum(turns.values()) == pytest.approx(any_open, abs=1e-6)


def test_taking_turns_with_a_process_that_always_has_work_leaves_half_of_the_time() -> None:
    assert shares_in_turns({"a": 0.6, "b": 1.0}) == {"a": pytest.approx(0.3), "b": pytest.approx(0.7)}


@given(demands, st.floats(0.001, 1.5))
def test_whatever_is_wanted_each_gets_a_part_and_all_no_more_than_the_device_did(
    wanted: dict[int, SmDemand], activity: float
) -> None:
    parts = fit_to_activity(wanted, list(wanted), [], activity)
    assert all(0 <= part <= 1 + 1e-9 for part in parts.values())


def test_many_clients_that_are_alike_get_alike() -> None:
    wanted = {n: SmDemand(0.5, 1.0, 1e6) for n in range(12)}
    parts = fit_to_activity(wanted, list(wanted), list(wanted), 1.0)
    assert all(part == pytest.approx(parts[0]) and part > 0 for part in parts.values())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_who_takes_turns_has_its_part_of_each_moment(opens: list[float]) -> None:
    expected = dict.fromkeys(range(len(opens)), 0.0)
    for present in product((False, True), repeat=len(opens)):
        chance = math.prod(time if here else 1 - time for time, here in zip(opens, present, strict=True))
        for key in (key for key, here in enumerate(present) if here):
            expected[key] += chance / sum(present)
    assert shares_in_turns(dict(enumerate(opens))) == pytest.approx(expected, abs=1e-12)
