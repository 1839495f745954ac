# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What measured pairs say of pairs that were never measured: the prior times `exp(mean + b_i + b_j + U_i·V_j)`.

Invariant: it speaks for a GPU model only where its cross-validated error there is less than that of what stands
without it, and every weight says so with both errors. One fit per GPU model: what one model shows of another was found
to be worth less than it costs. Where no measurement says what the prior was, there is no ratio to learn: the
throughput itself is learned, and the constant is what has to be beaten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Final

from fleet.weights.factors import LEAST_CELLS, Cell, Factors, Settings, chosen, constant, error, fit, validated
from fleet.weights.table import Measured, Pair, Table

MOST_RANK: Final = 4
_LEAST_THROUGHPUT: Final = 1e-3
"""A logarithm needs more than 0, and less than this is as good as nothing"""


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Of one GPU model."""

    factors: Factors
    settings: Settings
    cells: int
    relative: bool
    """Whether it multiplies the prior; else it gives the throughput itself"""
    error: float
    """Mean absolute error of the throughput on pairs that the fit did not see"""
    error_without: float
    """Of the prior, or where there is none, of the constant"""
    ratios: Mapping[tuple[str, str], float]
    """Of every online and offline kind that was seen"""

    @property
    def used(self) -> bool:
        return self.error < self.error_without

    def ratio(self, online: str, offline: str) -> float:
        """What the prior, or 1, is multiplied with."""
        found = self.ratios.get((online, offline))
        return exp(self.factors.log_ratio(online, offline)) if found is None else found

    def sentence(self, model: str) -> str:
        """What was learned, and whether it is used."""
        other = "the prior's" if self.relative else "a constant's"
        verdict = "used" if self.used else "not used"
        return (
            f"{model}: learned from {self.cells} pairs at rank {self.settings.rank}, {verdict}: "
            f"error {self.error:.3f} on unseen pairs, {other} {self.error_without:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """Of all GPU models with enough pairs."""

    by_model: Mapping[str, ModelFit]

    def line(self, pair: Pair) -> tuple[float, float] | None:
        """A constant and a factor of the prior, one of them 0. None: the prior stands."""
        found = self.by_model.get(pair.model)
        if found is None or not found.used:
            return None
        ratio = found.ratio(pair.online, pair.offline)
        return (0.0, ratio) if found.relative else (ratio, 0.0)

    def error(self, pair: Pair) -> float | None:
        """None: the prior is used."""
        found = self.by_model.get(pair.model)
        return found.error if found is not None and found.used else None

    def why(self, pair: Pair) -> str:
        """One clause."""
        found = self.by_model[pair.model]
        return f"learned from {found.cells} pairs on {pair.model} (error {found.error:.2f} < {found.error_without:.2f})"

    def sentences(self) -> list[str]:
        """What `plan` prints of it."""
        return [found.sentence(model) for model, found in sorted(self.by_model.items())]


def learn(table: Table, seed: int = 0) -> Table:
    """The table, with what it teaches of other pairs."""
    fits = {}
    for model in sorted({pair.model for pair in table.pairs}):
        mine = {pair: found for pair, found in table.pairs.items() if pair.model == model}
        if (fitted := _fit(mine, seed)) is not None:
            fits[model] = fitted
    return replace(table, learned=Learned(fits))


def _fit(pairs: Mapping[Pair, Measured], seed: int) -> ModelFit | None:
    """None: too few pairs to tell whether anything was learned."""
    relative = any(found.prior for found in pairs.values())
    cells = cells_of(pairs, relative)
    if len(cells) < LEAST_CELLS:
        return None
    settings, learned_error = chosen(cells, MOST_RANK, seed)
    without = error(Factors(0.0, {}, {}), cells) if relative else validated(cells, constant, seed)
    factors = fit(cells, settings)
    ratios = {(row, column): exp(factors.log_ratio(row, column)) for row in factors.rows for column in factors.columns}
    return ModelFit(factors, settings, len(cells), relative, learned_error, without, ratios)


def cells_of(pairs: Mapping[Pair, Measured], relative: bool) -> Sequence[Cell]:
    """Of one GPU model, in a fixed order. `relative`: of pairs whose prior is known, the ratio to it."""
    cells = []
    for pair, found in sorted(pairs.items()):
        scale = found.prior if relative else 1.0
        if scale:
            ratio = max(found.throughput, _LEAST_THROUGHPUT) / scale
            cells.append(Cell(pair.online, pair.offline, log(ratio), scale))
    return cells
