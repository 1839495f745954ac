# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Non-negative least squares with priors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.nnls import Evidence, Unknown

Row = tuple[Sequence[float], float]  # coefficients, seen


def evidence(rows: Sequence[Row], memory: float = 1.0) -> Evidence[int]:
    made = Evidence[int](memory)
    for coefficients, seen in rows:
        made.add(dict(enumerate(coefficients)), seen, lambda _: 0.0)
    return made


def solve(priors: Sequence[Unknown], rows: Sequence[Row], variance: float = 1.0) -> list[Unknown]:
    found = evidence(rows).solve(priors.__getitem__, variance)
    return [found[key] for key in sorted(found)]


def test_what_the_rows_determine_is_found_whatever_was_believed() -> None:
    rng = random.Random(1)
    rows = [((a, b), 2 * a + 5 * b) for _ in range(30) for a, b in [(rng.random(), rng.random())]]
    found = solve([Unknown(0.0, None), Unknown(9.0, 100.0)], rows)
    assert [one.value for one in found] == pytest.approx([2, 5], rel=1e-3)
    assert max(one.sigma or 0.0 for one in found) < 1


def test_what_they_do_not_determine_is_split_as_it_was_believed() -> None:
    a, b = solve([Unknown(3.0, 0.1), Unknown(1.0, 0.1)], [((1.0, 1.0), 8.0)] * 20, 0.001)
    assert a.value + b.value == pytest.approx(8, rel=0.01)
    assert a.value - b.value == pytest.approx(2, rel=0.01)


def test_an_unknown_with_a_narrower_prior_moves_less() -> None:
    a, b = solve([Unknown(1.0, 0.01), Unknown(1.0, 1.0)], [((1.0, 1.0), 3.0)], 1e-6)
    assert [a.value, b.value] == pytest.approx([1, 2], abs=0.01)
    assert (a.sigma or 0.0) < 0.02


def test_an_unknown_that_another_explains_as_well_keeps_its_prior_with_an_infinite_deviation() -> None:
    found = solve([Unknown(4.0, None), Unknown(1.0, None)], [((1.0, 1.0), 5.0)] * 3)
    assert sorted(math.isinf(one.sigma or 0.0) for one in found) == [False, True]


def test_the_solution_is_the_least_of_all_sums_of_squares() -> None:
    rng = random.Random(2)
    rows = [((rng.random(), rng.random(), rng.random()), rng.random()) for _ in range(12)]
    priors = [Unknown(0.5, 0.4), Unknown(0.2, 0.3), Unknown(0.9, 0.5)]

    def squares(x: Sequence[float]) -> float:
        off = sum((seen - sum(a * b for a, b in zip(row, x, strict=True))) ** 2 for row, seen in rows) / 0.1
        return off + sum((b - p.value) ** 2 / (p.sigma or 1.0) ** 2 for b, p in zip(x, priors, strict=True))

    found = [one.value for one in solve(priors, rows, 0.1)]
    beside = [
        [max(0.0, value + step) for value, step in zip(found, steps, strict=True)]
        for steps in product((-1e-3, 0.0, 1e-3), repeat=3)
    ]
    assert squares(found) == min(map(squares, beside))


def test_older_observations_count_less() -> None:
    found = evidence([((1.0,), 1.0), ((1.0,), 0.0)], memory=0.5).solve(lambda _: Unknown(0.0, None), 1.0)
    assert found[0].value == pytest.approx(0.5 / 1.5)


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=9), st.floats(0.5, 1))
def test_the_error_is_that_of_all_observations(rows: list[list[float]], memory: float) -> None:
    values = (0.3, 0.7, 0.1)
    made = evidence([(row[:3], row[3]) for row in rows], memory)
    ages = [memory**age for age in range(len(rows))]
    squares = [(row[3] - sum(a * b for a, b in zip(row[:3], values, strict=True))) ** 2 for row in reversed(rows)]
    mean = sum(age * square for age, square in zip(ages, squares, strict=True)) / sum(ages)
    assert made.error(values.__getitem__) == pytest.approx(math.sqrt(mean), abs=1e-7)


def test_what_a_dropped_unknown_explained_is_no_longer_looked_for() -> None:
    made = evidence([((1.0, 1.0), 5.0), ((1.0, 2.0), 8.0)])
    made.drop({1}, lambda _: 3.0)
    assert made.solve(lambda _: Unknown(0.0, None), 1.0)[0].value == pytest.approx(2.0)
    assert made.error(lambda _: 2.0) == pytest.approx(0.0, abs=1e-6)


def test_an_unknown_leaves_after_so_many_observations_without_it() -> None:
    made = Evidence[str](lasts=3)
    for seen in ({"a": 1.0, "b": 1.0}, {"a": 1.0}, {"a": 1.0}):
        made.add(seen, 1.0, lambda _: 0.5)
    assert set(made.keys) == {"a", "b"}
    made.add({"a": 1.0}, 1.0, lambda _: 0.5)
    assert set(made.keys) == {"a"}


def test_unknowns_are_bounded_and_the_smallest_are_taken_to_be_what_they_were() -> None:
    made = Evidence[int]()
    made.add({key: 1.0 if key < 64 else 0.5 for key in range(100)}, 64 * 2 + 36 * 0.5 * 3.0, lambda _: 3.0)
    assert set(made.keys) == set(range(64))
    assert made.error(lambda _: 2.0) == pytest.approx(0.0, abs=1e-5)


def test_many_unknowns_are_moved_together_and_the_uncertain_ones_for_themselves() -> None:
    made = Evidence[int]()
    priors = {key: Unknown(1.0, 0.5 if key < 16 else 0.1) for key in range(40)}
    rng = random.Random(3)
    for _ in range(200):
        row = {key: rng.random() for key in range(40)}
        made.add(row, sum(a * (2.0 if key == 0 else 1.1) for key, a in row.items()), lambda _: 1.0)
    found = made.solve(priors.__getitem__, 0.01)
    assert found[0].value == pytest.approx(2.0, abs=0.05)
    assert {round(found[key].value, 6) for key in range(16, 40)} == {round(found[16].value, 6)}
    assert found[16].value == pytest.approx(1.1, abs=0.02)


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), st.floats(0, 1e6)),
        max_size=12,
    ),
    st.lists(st.floats(0, 100), min_size=3, max_size=3),
    st.floats(1e-6, 1e6),
)
def test_values_are_finite_and_never_negative(rows: list[Row], priors: list[float], variance: float) -> None:
    found = evidence(rows).solve(lambda key: Unknown(priors[key], 0.5), variance)
    assert all(math.isfinite(one.value) and one.value >= 0 for one in found.values())
