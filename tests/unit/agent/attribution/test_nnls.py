# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Non-negative least squares with priors."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.attribution.nnls import Row, Unknown, solve


def test_what_the_rows_determine_is_found_whatever_was_believed() -> None:
    rng = random.Random(1)
    rows = [Row((a, b), 2 * a + 5 * b, 1.0) for _ in range(30) for a, b in [(rng.random(), rng.random())]]
    values, sigmas = solve([Unknown(0.0, None), Unknown(9.0, 100.0)], rows)
    assert values == pytest.approx([2, 5], rel=1e-3)
    assert max(sigmas) < 1


def test_what_they_do_not_determine_is_split_as_it_was_believed() -> None:
    rows = [Row((1.0, 1.0), 8.0, 1000.0)] * 20
    values, _ = solve([Unknown(3.0, 0.1), Unknown(1.0, 0.1)], rows)
    assert sum(values) == pytest.approx(8, rel=0.01)
    assert values[0] - values[1] == pytest.approx(2, rel=0.01)


def test_an_unknown_with_a_narrower_prior_moves_less() -> None:
    values, sigmas = solve([Unknown(1.0, 0.01), Unknown(1.0, 1.0)], [Row((1.0, 1.0), 3.0, 1e6)])
    assert values == pytest.approx([1, 2], abs=0.01)
    assert sigmas[0] < 0.02


def test_an_unknown_without_observations_keeps_its_prior_with_an_infinite_deviation() -> None:
    values, sigmas = solve([Unknown(4.0, None), Unknown(1.0, 0.5)], [Row((0.0, 1.0), 1.0, 1.0)])
    assert values[0] == 4
    assert math.isinf(sigmas[0])


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0, 1e3), min_size=3, max_size=3), st.floats(0, 1e6), st.floats(1e-6, 1e6)),
        max_size=12,
    ),
    st.lists(st.floats(0, 100), min_size=3, max_size=3),
)
def test_values_are_finite_and_never_negative(
    rows: list[tuple[list[float], float, float]], priors: list[float]
) -> None:
    values, _ = solve([Unknown(prior, 0.5) for prior in priors], [Row(*row) for row in rows])
    assert all(math.isfinite(value) and value >= 0 for value in values)
