# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What processes that run side by side get of what they could use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sharing import Demand, fitted, shares_of_wanted, taking_turns

demands = st.dictionaries(
    st.integers(0, 40),
    st.builds(Demand, st.floats(0.001, 1), st.floats(0.01, 1), st.floats(1_000, 1e7)),
    max_size=20,
)


def test_who_is_alone_gets_all() -> None:
    assert shares_of_wanted({"a": Demand(0.7, 1.0, 5e5)}) == {"a": pytest.approx(1)}


def test_two_that_fit_beside_each_other_get_all() -> None:
    both = {"a": Demand(1.0, 0.4, 5e5), "b": Demand(1.0, 0.5, 5e4)}
    assert shares_of_wanted(both) == {"a": pytest.approx(1), "b": pytest.approx(1)}


def test_two_alike_that_want_everything_get_a_half_each() -> None:
    parts = shares_of_wanted({"a": Demand(1.0, 1.0, 5e5), "b": Demand(1.0, 1.0, 5e5)})
    assert parts == {"a": pytest.approx(0.5), "b": pytest.approx(0.5)}


def test_long_kernels_get_more_of_what_they_want_than_short_ones() -> None:
    parts = shares_of_wanted({"long": Demand(0.9, 1.0, 1e6), "short": Demand(0.9, 1.0, 1e5)})
    assert parts["long"] > 1.5 * parts["short"]


def test_who_meets_another_only_now_and_then_loses_little() -> None:
    parts = shares_of_wanted({"a": Demand(0.5, 1.0, 5e5), "b": Demand(0.01, 1.0, 5e5)})
    assert parts["a"] > 0.99
    assert parts["b"] < 0.8


@given(demands, st.floats(0, 1.2))
def test_nobody_gets_more_than_it_wants_and_together_not_more_than_there_was(
    wanted: dict[int, Demand], activity: float
) -> None:
    parts = fitted(wanted, wanted.keys(), wanted.keys(), activity)
    assert parts.keys() == wanted.keys()
    assert all(0 <= part <= 1 + 1e-9 for part in parts.values())


@given(demands, st.floats(0.01, 1))
def test_those_that_take_turns_are_cut_alike(wanted: dict[int, Demand], activity: float) -> None:
    parts = fitted(wanted, (), wanted.keys(), activity)
    total = sum(one.time * one.sms for one in wanted.values())
    assert all(part == pytest.approx(min(1.0, activity / total)) for part in parts.values())


@given(st.dictionaries(st.integers(0, 40), st.floats(0, 1), max_size=20))
def test_who_takes_turns_has_no_more_than_it_waited_and_all_no_more_than_there_is(opens: dict[int, float]) -> None:
    turns = taking_turns(opens)
    assert all(0 <= turns[key] <= time + 1e-9 for key, time in opens.items())
    if len(opens) <= 8:  # beyond that a bound is taken for the sum over who has work
        anybody = 1 - math.prod(1 - time for time in opens.values())
        assert sum(turns.values()) == pytest.approx(anybody, abs=1e-6)


def test_who_takes_turns_with_one_that_is_always_there_has_half_of_its_time() -> None:
    assert taking_turns({"a": 0.6, "b": 1.0}) == {"a": pytest.approx(0.3), "b": pytest.approx(0.7)}


@given(demands, st.floats(0.001, 1.5))
def test_whatever_is_wanted_each_gets_a_part_and_all_no_more_than_the_device_did(
    wanted: dict[int, Demand], activity: float
) -> None:
    parts = fitted(wanted, list(wanted), [], activity)
    assert all(0 <= part <= 1 + 1e-9 for part in parts.values())


def test_many_clients_that_are_alike_get_alike() -> None:
    wanted = {n: Demand(0.5, 1.0, 1e6) for n in range(12)}
    parts = fitted(wanted, list(wanted), list(wanted), 1.0)
    assert all(part == pytest.approx(parts[0]) and part > 0 for part in parts.values())
