# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A table of logarithms with holes, as `mean + b_i + b_j + U_i·V_j`: alternating least squares, cross-validation.

Invariant: same cells, same settings, same result; a row or column without a cell has bias and factors of 0. Each half
step is the exact minimum of the ridge objective over its side, so the objective never grows. Logarithms, as what two
jobs do to each other multiplies. Source of the model: regularised matrix factorisation with biases (Koren, Bell and
Volinsky, "Matrix factorization techniques for recommender systems", 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any, Final

import numpy as np

_ROUNDS: Final = 30
LEAST_CELLS: Final = 10
"""With fewer there is nothing to validate with"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One known entry."""

    row: str
    column: str
    log_ratio: float
    scale: float = 1.0
    """What `exp(log_ratio)` is multiplied with to give a throughput: errors are of throughput"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one fit."""

    rank: int = 4
    bias_ridge: float = 0.03
    factor_ridge: float = 0.3
    seed: int = 0
    """Of where the factors start"""


@dataclass(frozen=True, slots=True)
class Factors:
    """What was fitted."""

    mean: float
    rows: dict[str, tuple[float, tuple[float, ...]]]
    columns: dict[str, tuple[float, tuple[float, ...]]]

    def log_ratio(self, row: str, column: str) -> float:
        """Of a row or column that is unknown, what the rest says."""
        row_bias, left = self.rows.get(row, (0.0, ()))
        column_bias, right = self.columns.get(column, (0.0, ()))
        return self.mean + row_bias + column_bias + sum(u * v for u, v in zip(left, right, strict=False))


Fit = Callable[[Sequence[Cell]], Factors]


def constant(cells: Sequence[Cell]) -> Factors:
    """The median everywhere: the baseline that knows nothing of rows and columns."""
    return Factors(float(np.median([cell.log_ratio for cell in cells])), {}, {})


def fit(cells: Sequence[Cell], settings: Settings) -> Factors:
    """Rank 0 is row + column."""
    row_names, column_names = sorted({cell.row for cell in cells}), sorted({cell.column for cell in cells})
    row_at = {name: place for place, name in enumerate(row_names)}
    column_at = {name: place for place, name in enumerate(column_names)}
    at_row = np.array([row_at[cell.row] for cell in cells])
    at_column = np.array([column_at[cell.column] for cell in cells])
    mean = float(np.mean([cell.log_ratio for cell in cells]))
    wanted = np.array([cell.log_ratio for cell in cells]) - mean
    start = np.random.default_rng(settings.seed)
    right = start.normal(0.0, 0.1, (len(column_names), settings.rank + 1))  # bias, factors
    right[:, 0] = 0.0
    rows, columns = np.eye(len(row_names))[at_row].T, np.eye(len(column_names))[at_column].T
    for _ in range(_ROUNDS):
        left = _half_step(rows, right[at_column], wanted, settings)
        right = _half_step(columns, left[at_row], wanted, settings)
    return Factors(mean, _named(row_names, left), _named(column_names, right))


def _half_step(mine: Any, others: Any, wanted: Any, settings: Settings) -> Any:
    """One side's bias and factors, given the other side's of each cell. `mine`: names × cells, 1 for its own."""
    features = np.concatenate([np.ones((len(others), 1)), others[:, 1:]], axis=1)
    width = settings.rank + 1
    products = (features[:, :, None] * features[:, None, :]).reshape(len(features), width * width)
    ridge = np.diag([settings.bias_ridge] + [settings.factor_ridge] * settings.rank)
    right_sides = mine @ (features * (wanted - others[:, 0])[:, None])
    return np.linalg.solve((mine @ products).reshape(-1, width, width) + ridge, right_sides[:, :, None])[:, :, 0]


def _named(names: Sequence[str], found: Any) -> dict[str, tuple[float, tuple[float, ...]]]:
    rows = (tuple(float(value) for value in row) for row in found)
    return {name: (row[0], row[1:]) for name, row in zip(names, rows, strict=True)}


def error(factors: Factors, cells: Sequence[Cell]) -> float:
    """Mean absolute error of the throughput over the cells."""
    misses = [cell.scale * abs(_at_most_one(cell, factors) - exp(cell.log_ratio)) for cell in cells]
    return sum(misses) / len(misses)


def _at_most_one(cell: Cell, factors: Factors) -> float:
    """The ratio that stands for a throughput of at most 1, as nothing is faster beside another one than alone."""
    return min(exp(min(factors.log_ratio(cell.row, cell.column), 50.0)), 1.0 / cell.scale)


def validated(cells: Sequence[Cell], fitted: Fit, seed: int, known: float = 0.8) -> float:
    """Mean of `error` over splits in which the part `known` is seen and the rest is not; each cell is unseen once."""
    order = np.random.default_rng(seed).permutation(len(cells))
    folds = max(2, round(1 / (1 - known)))
    total = 0.0
    for fold in range(folds):
        unseen = [cells[place] for place in order[fold::folds]]
        seen = [cells[place] for start in range(folds) if start != fold for place in order[start::folds]]
        total += error(fitted(seen), unseen) * len(unseen)
    return total / len(cells)


def chosen(cells: Sequence[Cell], most_rank: int, seed: int) -> tuple[Settings, float]:
    """The rank and ridge with the least cross-validated error, and that error."""
    candidates = [
        Settings(rank, factor_ridge=ridge, seed=seed)
        for rank in (0, 1, 2, 4)
        if rank <= most_rank
        for ridge in ((0.3,) if rank == 0 else (0.1, 0.3))
    ]
    errors = {one: validated(cells, partial(fit, settings=one), seed) for one in candidates}
    best = min(errors, key=lambda one: (errors[one], one.rank))
    return best, errors[best]
