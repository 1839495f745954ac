# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Non-negative least squares with priors, with the standard deviation of each value. Pure.

argmin over x ≥ 0 of Σ_t w_t (y_t − Σ_j a_tj x_j)² + Σ_j ((x_j − prior_j) ÷ sigma_j)². A few dozen unknowns, so the
normal equations are solved outright; those that come out negative are held at 0 and the rest is solved again, as in
Lawson and Hanson's active set method (Solving Least Squares Problems, 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

_SINGULAR = 1e-10  # of the diagonal: an unknown that others explain as well keeps its prior


@dataclass(frozen=True, slots=True)
class Unknown:
    """The prior of an unknown, with its standard deviation. `sigma` None: no prior."""

    prior: float
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One observation: coefficients by unknown, the observed sum, its weight (1 ÷ variance)."""

    coefficients: Sequence[float]
    seen: float
    weight: float


def solve(unknowns: Sequence[Unknown], rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """(values, standard deviations), one per unknown. One that no row has keeps its prior, ± infinity."""
    size = len(unknowns)
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row in rows:
        used = [(j, a) for j, a in enumerate(row.coefficients) if a]
        for place, (j, a) in enumerate(used):
            weighted = row.weight * a
            right[j] += weighted * row.seen
            line = normal[j]
            for k, b in used[: place + 1]:
                line[k] += weighted * b
    for j in range(size):
        for k in range(j):
            normal[k][j] = normal[j][k]
    for j, unknown in enumerate(unknowns):
        if unknown.sigma:
            normal[j][j] += 1 / unknown.sigma**2
            right[j] += unknown.prior / unknown.sigma**2
    return _active_set(normal, right, [max(0.0, unknown.prior) for unknown in unknowns])


def _active_set(normal: list[list[float]], right: list[float], priors: list[float]) -> tuple[list[float], list[float]]:
    free = [j for j in range(len(priors)) if normal[j][j] > 0]
    values = list(priors)
    sigmas = [float("inf")] * len(priors)
    for j in free:
        values[j] = 0.0
        sigmas[j] = normal[j][j] ** -0.5
    while free:
        solved, variances = _invert(normal, right, free, priors)
        if min(solved) >= 0:
            for j, value, variance in zip(free, solved, variances, strict=True):
                values[j], sigmas[j] = value, variance**0.5
            break
        free = [j for j, value in zip(free, solved, strict=True) if value > 0]
    return values, sigmas


def _invert(
    normal: list[list[float]], right: list[float], free: list[int], priors: list[float]
) -> tuple[list[float], list[float]]:
    """Solution and variances of the free unknowns, by Cholesky's factor of the scaled matrix."""
    scale = [normal[j][j] ** -0.5 for j in free]
    lower: list[list[float]] = []
    dropped = set()
    for i, a in enumerate(free):
        line = normal[a]
        row: list[float] = []
        for k, above in enumerate(lower):
            rest = line[free[k]] * scale[i] * scale[k] - sum(map(mul, row, above))
            row.append(rest * above[k])
        pivot = 1.0 - sum(map(mul, row, row))
        if pivot <= _SINGULAR:
            dropped.add(i)
            row = [0.0] * i
        row.append(1 / pivot**0.5 if pivot > _SINGULAR else 0.0)  # its inverse, which is all that is asked for
        lower.append(row)
    inverse = _inverse(lower)
    scaled = [right[j] * scale[i] for i, j in enumerate(free)]
    ahead = [sum(map(mul, row, scaled)) for row in inverse]
    solved, variances = [], []
    for i, j in enumerate(free):
        if i in dropped:
            solved.append(priors[j])
            variances.append(float("inf"))
            continue
        solved.append(sum(inverse[k][i] * ahead[k] for k in range(i, len(free))) * scale[i])
        variances.append(sum(inverse[k][i] ** 2 for k in range(i, len(free))) * scale[i] ** 2)
    return solved, variances


def _inverse(lower: list[list[float]]) -> list[list[float]]:
    """Of a lower triangular matrix whose diagonal is given as its inverse; 0 there: a row that is not in it."""
    inverse: list[list[float]] = []
    for i, row in enumerate(lower):
        line = [0.0] * i + [row[i]]
        for k in range(i):
            if row[k]:
                factor = row[k] * row[i]
                for column, value in enumerate(inverse[k]):
                    line[column] -= factor * value
        inverse.append(line)
    return inverse
