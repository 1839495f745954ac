# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Non-negative least squares with priors, and how sure the answer is. Pure.

argmin over x ≥ 0 of Σ_t w_t (y_t − Σ_j a_tj x_j)² + Σ_j ((x_j − prior_j) ÷ sigma_j)². A few dozen unknowns, so
coordinate descent on the normal equations (Franc, Hlaváč and Navara, 2005) and a plain inverse are quick enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SWEEPS = 200
_CLOSE = 1e-6
_MOST_INVERTED = 24


@dataclass(frozen=True, slots=True)
class Unknown:
    """What is believed before: `sigma` None: nothing."""

    prior: float
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One observation: coefficients by unknown, the sum that was seen, its weight (1 ÷ variance)."""

    coefficients: Sequence[float]
    seen: float
    weight: float


def solve(unknowns: Sequence[Unknown], rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """(values, standard deviations), one per unknown. One that nothing tells of keeps its prior, infinitely unsure."""
    size = len(unknowns)
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row in rows:
        used = [j for j, a in enumerate(row.coefficients) if a]
        for j in used:
            weighted = row.weight * row.coefficients[j]
            right[j] += weighted * row.seen
            line = normal[j]
            for k in used:
                line[k] += weighted * row.coefficients[k]
    for j, unknown in enumerate(unknowns):
        if unknown.sigma:
            normal[j][j] += 1 / unknown.sigma**2
            right[j] += unknown.prior / unknown.sigma**2
    values = _descend(normal, right, [max(0.0, unknown.prior) for unknown in unknowns])
    return values, [variance**0.5 for variance in _variances(normal)]


def _descend(normal: list[list[float]], right: list[float], values: list[float]) -> list[float]:
    size = len(values)
    for _ in range(_SWEEPS):
        largest = 0.0
        for j in range(size):
            diagonal = normal[j][j]
            if diagonal <= 0:
                continue
            line = normal[j]
            gradient = right[j] - sum(line[k] * values[k] for k in range(size))
            new = max(0.0, values[j] + gradient / diagonal)
            largest = max(largest, abs(new - values[j]) / (abs(new) + abs(values[j]) + 1e-30))
            values[j] = new
        if largest < _CLOSE:
            break
    return values


def _variances(normal: list[list[float]]) -> list[float]:
    """The diagonal of the inverse; of a large system its lower bound."""
    size = len(normal)
    if size > _MOST_INVERTED:
        return [1 / line[j] if line[j] > 0 else float("inf") for j, line in enumerate(normal)]
    scale = [line[j] ** -0.5 if line[j] > 0 else 0.0 for j, line in enumerate(normal)]
    work = [[normal[i][j] * scale[i] * scale[j] + (1e-9 if i == j else 0) for j in range(size)] for i in range(size)]
    inverse = [[float(i == j) for j in range(size)] for i in range(size)]
    for i in range(size):
        pivot = work[i][i]
        if pivot <= 1e-12:
            continue
        work[i] = [value / pivot for value in work[i]]
        inverse[i] = [value / pivot for value in inverse[i]]
        for k in range(size):
            factor = work[k][i]
            if k != i and factor:
                work[k] = [a - factor * b for a, b in zip(work[k], work[i], strict=True)]
                inverse[k] = [a - factor * b for a, b in zip(inverse[k], inverse[i], strict=True)]
    return [max(0.0, inverse[j][j]) * scale[j] ** 2 if scale[j] else float("inf") for j in range(size)]
