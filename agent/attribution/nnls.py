# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Non-negative least squares with priors, over observations that fade, with the standard deviation of each value.

argmin over x ≥ 0 of Σ_t w_t (y_t − Σ_j a_tj x_j)² ÷ v + Σ_j ((x_j − prior_j) ÷ sigma_j)². Observations are kept as the
normal equations, Σ w a_j a_k and Σ w a_j y, so what a new one costs does not grow with their number. Of many unknowns
those that may be off by most are solved for one by one, and the rest by one common factor. Unknowns that come out
negative are held at 0 and the others are solved again, as in Lawson and Hanson's active set method (Solving Least
Squares Problems, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import mul
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
Values = Callable[[K], float]
_SINGULAR = 1e-10  # of the diagonal: an unknown that others explain as well keeps its prior
_MOST_KEPT = 64
_MOST_SINGLE = 16  # with a prior; those without one are all solved for one by one


class Unknown(NamedTuple):
    """A value and its standard deviation. Prior: None where there is none; solution: ∞ where none was found."""

    value: float
    sigma: float | None


@dataclass(slots=True)
class Evidence(Generic[K]):
    """The observations. `memory`: weight of one against the next; `lasts`: an unknown leaves so many after its last."""

    memory: float = 1.0
    lasts: int = 1 << 30
    count: int = 0
    _keys: list[K] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)  # the observation in which each last was
    _normal: list[list[float]] = field(default_factory=list)
    _right: list[float] = field(default_factory=list)
    _square: float = 0.0  # of what was seen
    _weight: float = 0.0

    def add(self, coefficients: Mapping[K, float], seen: float, values: Values[K]) -> None:
        """Adds an observation. `values`: what those unknowns are taken to be that there is no room for."""
        self.count += 1
        coefficients = {key: value for key, value in coefficients.items() if value}
        if len(coefficients) > _MOST_KEPT:
            kept = set(nlargest(_MOST_KEPT, coefficients, coefficients.__getitem__))
            seen = max(0.0, seen - sum(value * values(key) for key, value in coefficients.items() if key not in kept))
            coefficients = {key: value for key, value in coefficients.items() if key in kept}
        self._append(coefficients.keys() - set(self._keys))
        row, memory = [coefficients.get(key, 0.0) for key in self._keys], self.memory
        for at, a in enumerate(row):
            self._normal[at] = [before * memory + a * b for before, b in zip(self._normal[at], row)]  # noqa: B905  # hot
            if a:
                self._last[at] = self.count
        self._right = [before * memory + a * seen for before, a in zip(self._right, row, strict=True)]
        self._square = self._square * memory + seen * seen
        self._weight = self._weight * memory + 1.0
        self._drop_oldest(values)

    def _append(self, keys: Collection[K]) -> None:
        nothing = [0.0] * len(keys)
        for line in self._normal:
            line.extend(nothing)
        self._keys.extend(keys)
        self._last.extend([0] * len(keys))
        self._right.extend(nothing)
        self._normal.extend([0.0] * len(self._keys) for _ in keys)

    def _drop_oldest(self, values: Values[K]) -> None:
        """Drops unknowns that are in no recent observation; of too many, those that were longest in none."""
        excess, first = len(self._keys) - _MOST_KEPT, self.count - self.lasts
        if excess > 0 or min(self._last, default=self.count) <= first:
            order = sorted(range(len(self._keys)), key=lambda at: (self._last[at], self._normal[at][at]))
            gone = [at for place, at in enumerate(order) if place < excess or self._last[at] <= first]
            self.drop({self._keys[at] for at in gone}, values)

    @property
    def keys(self) -> Sequence[K]:
        """The unknowns."""
        return self._keys

    def drop(self, gone: Collection[K], values: Values[K]) -> None:
        """Drops unknowns, and takes what they explain, with these values, out of what was seen."""
        final = [values(key) if key in gone else 0.0 for key in self._keys]
        explained = [_dot(line, final) for line in self._normal]
        self._square += _dot(explained, final) - 2 * _dot(self._right, final)
        kept = [at for at, key in enumerate(self._keys) if key not in gone]
        self._right = [max(0.0, self._right[at] - explained[at]) for at in kept]
        self._normal = [[self._normal[at][other] for other in kept] for at in kept]
        self._keys, self._last = [self._keys[at] for at in kept], [self._last[at] for at in kept]

    def error(self, values: Values[K]) -> float:
        """Root of the mean squared difference between what was seen and what these values explain."""
        x = [values(key) for key in self._keys]
        explained = sum(_dot(line, x) * value for line, value in zip(self._normal, x, strict=True))
        square = self._square - 2 * _dot(self._right, x) + explained
        return math.sqrt(max(0.0, square) / self._weight) if self._weight else 0.0

    def solve(self, prior_of: Callable[[K], Unknown], variance: float) -> dict[K, Unknown]:
        """Each unknown's value; ± infinity where nothing is known of it. `variance`: of an observation."""
        priors = [prior_of(key) for key in self._keys]
        single = self._most_uncertain(priors)
        normal = [[self._normal[at][other] for other in single] for at in single]
        right = [self._right[at] for at in single]
        unknowns = [priors[at] for at in single]
        if len(single) < len(priors):
            unknowns.append(self._add_common_factor(normal, right, single, priors))
        solved = _solve(normal, right, unknowns, variance)
        factor = solved[-1].value if solved else 1.0
        found = {self._keys[at]: one for at, one in zip(single, solved, strict=False)}
        for key, prior in zip(self._keys, priors, strict=True):
            found.setdefault(key, Unknown(prior.value * factor, (prior.sigma or 0.0) * factor))
        return found

    def _most_uncertain(self, priors: Sequence[Unknown]) -> list[int]:
        """Those without a prior; of the others those that may be off by most."""
        known = [at for at, prior in enumerate(priors) if prior.sigma]
        rest = sorted(known, key=lambda at: -self._variance(at, priors[at]))[_MOST_SINGLE:]
        return sorted(set(range(len(priors))).difference(rest), key=lambda at: -self._normal[at][at])

    def _variance(self, at: int, prior: Unknown) -> float:
        sigma = prior.sigma or 0.0
        return self._normal[at][at] * sigma * sigma

    def _add_common_factor(
        self, normal: list[list[float]], right: list[float], single: Collection[int], priors: Sequence[Unknown]
    ) -> Unknown:
        """Adds the factor of all but the single ones' priors, which counts as one unknown; returns its prior."""
        common = [0.0 if at in single else prior.value for at, prior in enumerate(priors)]
        explained = [_dot(line, common) for line in self._normal]
        for line, at in zip(normal, single, strict=True):
            line.append(explained[at])
        normal.append([*(explained[at] for at in single), _dot(explained, common)])
        right.append(_dot(self._right, common))
        variance = sum(self._variance(at, prior) for at, prior in enumerate(priors) if at not in single)
        return Unknown(1.0, math.sqrt(variance / normal[-1][-1]) if normal[-1][-1] > 0 else None)


def _solve(
    normal: list[list[float]], right: list[float], unknowns: Sequence[Unknown], variance: float
) -> list[Unknown]:
    for j, unknown in enumerate(unknowns):
        if unknown.sigma:
            weight = variance / unknown.sigma**2
            normal[j][j] += weight
            right[j] += unknown.value * weight
    values, sigmas = _active_set(normal, right, [max(0.0, unknown.value) for unknown in unknowns])
    return [Unknown(value, sigma * math.sqrt(variance)) for value, sigma in zip(values, sigmas, strict=True)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


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
