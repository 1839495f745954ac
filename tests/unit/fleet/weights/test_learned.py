# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is learned of unseen pairs is used where it is better than what stands without it, and nowhere else."""

from __future__ import annotations

from math import exp, log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.model import Job, Slot
from fleet.weights.factors import Cell, Settings, chosen, constant, error, fit, validated
from fleet.weights.learned import Learned, learn
from fleet.weights.physical import Physical
from fleet.weights.table import Measured, Pair, Table

SLOT = Slot("node", "GPU-0", "H100", "service-0", 0.4, 0.010, 0.005, 1 << 35, None)
PRIOR = Physical().rows([SLOT], [Job("job", "program-0", 0, 0.001)]).__next__()[0] or 0.0


def cells(rank: int, count: int = 12, seed: int = 0) -> list[Cell]:
    """A full table of the rank over row and column."""
    draw = Random(seed)
    sides = [[[draw.gauss(0, 0.4) for _ in range(rank + 1)] for _ in range(count)] for _ in range(2)]
    return [
        Cell(f"row-{i}", f"column-{j}", min(0.0, one[0] + other[0] - 1 + sum(map(float.__mul__, one[1:], other[1:]))))
        for i, one in enumerate(sides[0])
        for j, other in enumerate(sides[1])
    ]


def test_rank_0_finds_rows_and_columns_that_add_up() -> None:
    table = [Cell(f"r{i}", f"c{j}", -0.1 * i - 0.2 * j) for i in range(6) for j in range(6)]
    assert error(fit(table, Settings(rank=0, bias_ridge=1e-9)), table) < 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_factors_predict_unseen_pairs_better_than_row_and_column_and_that_better_than_a_constant(seed: int) -> None:
    table = cells(2, seed=seed)
    errors = [
        validated(table, lambda seen: fit(seen, Settings(2, factor_ridge=0.03)), seed),
        validated(table, lambda seen: fit(seen, Settings(0)), seed),
        validated(table, constant, seed),
    ]
    assert errors == sorted(errors)


def test_the_settings_that_are_chosen_are_no_worse_than_row_and_column() -> None:
    for rank in (0, 2):
        table = cells(rank)
        assert chosen(table, 4, 0)[1] <= validated(table, lambda seen: fit(seen, Settings(0)), 0)


@given(st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=10)
def test_a_fit_is_the_same_for_the_same_seed_and_order(rank: int, seed: int) -> None:
    table = cells(1, count=5)
    assert fit(table, Settings(rank, seed=seed)) == fit(table, Settings(rank, seed=seed))


def test_a_kind_that_was_never_seen_gets_the_mean_and_the_others_bias() -> None:
    found = fit(cells(0), Settings(rank=0))
    assert found.log_ratio("unknown", "unknown") == found.mean
    assert found.log_ratio("row-1", "unknown") == found.mean + found.rows["row-1"][0]


def table_of(ratio: dict[tuple[int, int], float], prior: float | None) -> Table:
    """Pairs measured to `ratio` times the prior, or 1."""
    pairs = {
        Pair(f"service-{i}", f"program-{j}", "H100"): Measured((prior or 1.0) * value, 1, prior)
        for (i, j), value in ratio.items()
    }
    return Table(pairs)


def worse(i: int, j: int) -> float:
    return exp(-0.05 - 0.06 * i - 0.08 * j)


def test_a_pair_that_was_not_measured_gets_the_prior_times_what_others_teach() -> None:
    ratios = {(i, j): worse(i, j) for i in range(6) for j in range(6) if (i, j) != (0, 3)}
    table = learn(table_of(ratios, PRIOR))
    found = table.weight(SLOT, Job("job", "program-3", 0, 0.001))
    assert found is not None
    assert found.throughput == pytest.approx(PRIOR * worse(0, 3), rel=0.02)
    assert "learned" in found.why
    assert table.name == "learned"


def test_what_does_not_beat_the_prior_is_not_used_and_said_so() -> None:
    draw = Random(1)
    noise = {(i, j): exp(draw.choice([-1, 1]) * 0.02) for i in range(6) for j in range(6) if (i, j) != (0, 3)}
    table = learn(table_of(noise, PRIOR))
    assert isinstance(table.learned, Learned)
    (sentence,) = table.learned.sentences()
    assert "not used" in sentence
    found = table.weight(SLOT, Job("job", "program-3", 0, 0.001))
    assert found == Physical().weight(SLOT, Job("job", "program-3", 0, 0.001))


def test_without_priors_the_throughput_itself_is_learned() -> None:
    ratios = {(i, j): worse(i, j) for i in range(6) for j in range(6) if (i, j) != (0, 3)}
    found = learn(table_of(ratios, None)).weight(SLOT, Job("job", "program-3", 0, None))
    assert found is not None
    assert found.throughput == pytest.approx(worse(0, 3), rel=0.02)


def test_a_few_pairs_teach_nothing() -> None:
    table = learn(table_of({(i, 0): 0.5 for i in range(5)}, PRIOR))
    assert isinstance(table.learned, Learned)
    assert not table.learned.by_model


def test_errors_are_of_throughput_and_not_of_ratios() -> None:
    cell = Cell("row", "column", log(0.5), scale=0.4)
    assert error(constant([cell]), [Cell("row", "column", log(0.75), scale=0.4)]) == pytest.approx(0.1)
