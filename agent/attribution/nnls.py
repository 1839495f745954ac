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
    """Solution and variances of the free unknowns, by Gauss and Jordan on the scaled matrix."""
    scale = [normal[j][j] ** -0.5 for j in free]
    size = len(free)
    work = [
        [normal[a][b] * scale[i] * scale[k] for k, b in enumerate(free)] + [float(i == k) for k in range(size)]
        for i, a in enumerate(free)
    ]
    dropped = set()
    for i in range(size):
        pivot = work[i][i]
        if pivot <= _SINGULAR:
            dropped.add(i)
            continue
        row = work[i] = [value / pivot for value in work[i]]
        for k in range(size):
            factor = work[k][i]
            if k != i and factor:
                work[k] = [a - factor * b for a, b in zip(work[k], row, strict=True)]
    scaled = [right[j] * scale[i] for i, j in enumerate(free)]
    solved, variances = [], []
    for i, j in enumerate(free):
        if i in dropped:
            solved.append(priors[j])
            variances.append(float("inf"))
            continue
        solved.append(sum(work[i][size + k] * scaled[k] for k in range(size)) * scale[i])
        variances.append(max(0.0, work[i][size + i]) * scale[i] ** 2)
    return solved, variances
