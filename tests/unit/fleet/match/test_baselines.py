# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Baselines place one pod at a time, feasibly and without leaving a slot free that the pod can use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.match.baselines import BASELINES, first_fit, greedy

NAN = float("nan")


@given(
    st.sampled_from(sorted(BASELINES)),
    st.integers(0, 5),
    st.lists(st.tuples(*[st.one_of(st.just(NAN), st.floats(0.01, 1.0))] * 3), min_size=1, max_size=100),
    st.lists(st.integers(0, 2), max_size=100),
)
def test_no_slot_is_used_twice_and_none_stays_free_that_a_job_could_use(
    name: str, seed: int, weights: list[tuple[float, ...]], columns: list[int]
) -> None:
    cells = np.array(weights)
    found = BASELINES[name](cells, columns, seed)
    used = [slot for slot in found if slot is not None]
    assert len(found) == len(columns)
    assert len(set(used)) == len(used)
    taken: set[int] = set()
    for column, slot in zip(columns, found, strict=True):
        could = [place for place in range(len(cells)) if place not in taken and cells[place, column] > 0]
        assert (slot in could) if could else slot is None
        taken |= {slot} if slot is not None else set()


@given(
    st.lists(st.tuples(*[st.floats(0.01, 1.0)] * 2), min_size=70, max_size=130),
    st.lists(st.integers(0, 1), max_size=200),
)
@settings(max_examples=15)
def test_greedy_takes_the_best_slot_left(weights: list[tuple[float, ...]], columns: list[int]) -> None:
    cells = np.array(weights)
    left = set(range(len(cells)))
    for column, slot in zip(columns, greedy(cells, columns), strict=True):
        if slot is not None:
            assert cells[slot, column] == max(cells[place, column] for place in left)
            left.remove(slot)


def test_first_fit_takes_the_first_slot_left_that_can_run_it() -> None:
    weights = np.array([[NAN, 0.1], [0.2, 0.9], [0.9, 0.9]])
    assert first_fit(weights, [0, 1, 1, 1]) == [1, 0, 2, None]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_random_baseline_is_the_same_for_the_same_seed(seed: int) -> None:
    weights = np.full((50, 1), 0.5)
    again = BASELINES["random"](weights, [0] * 50, seed)
    assert BASELINES["random"](weights, [0] * 50, seed) == again
    assert BASELINES["random"](weights, [0] * 50, seed + 2) != again
