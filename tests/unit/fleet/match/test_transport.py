# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The transport problem over types is the dense assignment problem, and its result is integral and feasible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fleet.match.certificate import upper_bound
from fleet.match.transport import transport

Problem = tuple[Any, list[int], list[int]]


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> Problem:
    """At most 60 × 60 slots and jobs, with pairs that cannot be, ties and pairs that are worth nothing."""
    slot_types, job_types = draw(st.integers(1, most)), draw(st.integers(1, most))
    weight = st.one_of(st.just(np.nan), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0.0, 2.0))
    cells = draw(st.lists(weight, min_size=slot_types * job_types, max_size=slot_types * job_types))
    supply = draw(st.lists(st.integers(0, 10), min_size=slot_types, max_size=slot_types))
    demand = draw(st.lists(st.integers(0, 10), min_size=job_types, max_size=job_types))
    return np.array(cells).reshape(slot_types, job_types), supply, demand


def dense(worth: Any, supply: list[int], demand: list[int]) -> float:
    """The optimum over single slots and jobs; an unmatched one is a pair that is worth 0."""
    matrix = np.nan_to_num(worth, nan=0.0).repeat(supply, axis=0).repeat(demand, axis=1)
    chosen = linear_sum_assignment(matrix, maximize=True)
    return float(matrix[chosen].sum())


@given(problems())
@settings(max_examples=60)
def test_its_value_is_that_of_the_dense_assignment(problem: Problem) -> None:
    assert transport(*problem).value == pytest.approx(dense(*problem), abs=1e-5)


@given(problems())
@settings(max_examples=60)
def test_its_amounts_are_whole_feasible_and_worth_its_value(problem: Problem) -> None:
    worth, supply, demand = problem
    flow = transport(worth, supply, demand)
    assert all(isinstance(amount, int) and amount > 0 for amount in flow.amounts.values())
    for slot_type, most in enumerate(supply):
        assert sum(amount for (one, _), amount in flow.amounts.items() if one == slot_type) <= most
    for job_type, most in enumerate(demand):
        assert sum(amount for (_, one), amount in flow.amounts.items() if one == job_type) <= most
    assert sum(worth[pair] * amount for pair, amount in flow.amounts.items()) == pytest.approx(flow.value)


@given(problems())
@settings(max_examples=60)
def test_its_prices_certify_it(problem: Problem) -> None:
    worth, supply, demand = problem
    flow = transport(worth, supply, demand)
    bound = upper_bound(worth.repeat(supply, axis=0), flow.job_prices, demand)
    assert bound == pytest.approx(flow.value, abs=1e-4)
    prices = zip(supply, flow.slot_prices, strict=True), zip(demand, flow.job_prices, strict=True)
    assert sum(count * price for side in prices for count, price in side) == pytest.approx(flow.value, abs=1e-4)


@given(problems(), st.lists(st.floats(-1.0, 3.0), min_size=6, max_size=6))
def test_the_bound_is_at_least_the_optimum_whatever_the_prices(problem: Problem, prices: list[float]) -> None:
    worth, supply, demand = problem
    bound = upper_bound(worth.repeat(supply, axis=0), prices[: len(demand)], demand)
    assert bound >= dense(worth, supply, demand) - 1e-9


def test_a_slot_type_that_is_left_over_has_no_price() -> None:
    flow = transport(np.array([[0.9], [0.5]]), [1, 5], [3])
    assert flow.amounts == {(0, 0): 1, (1, 0): 2}
    assert flow.slot_prices == pytest.approx((0.4, 0.0))
    assert flow.job_prices == pytest.approx((0.5,))


def test_without_a_pair_nothing_is_placed() -> None:
    flow = transport(np.array([[np.nan, 0.0]]), [3], [2, 2])
    assert (flow.amounts, flow.value) == ({}, 0.0)
