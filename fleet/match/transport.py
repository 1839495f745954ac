# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The transport problem: how many jobs of each type go to slots of each type, for the greatest total.

max Σ c_ab·y_ab, Σ_b y_ab ≤ supply_a, Σ_a y_ab ≤ demand_b, y ≥ 0. Invariant: the result is integral. The matrix is a
bipartite incidence matrix, so totally unimodular, and the right sides are integers: each vertex is integral (Hoffman
and Kruskal, 1956), and HiGHS ends in a vertex. That is checked all the same. Its duals are the prices: what one more
slot, or one more job, of a type would add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fleet.model import FleetError

_INTEGRAL: Final = 1e-6
_METHODS: Final = ("highs-ipm", "highs-ds")
"""Interior point with crossover takes a third of the dual simplex's time where many pairs are worth nearly the same;
what ends in no vertex is solved by the simplex"""


@dataclass(frozen=True, slots=True)
class Flow:
    """An optimum."""

    amounts: Mapping[tuple[int, int], int]
    """(slot type, job type) → pairs, only where there are any"""
    slot_prices: tuple[float, ...]
    job_prices: tuple[float, ...]
    value: float


def transport(worth: Any, supply: Sequence[int], demand: Sequence[int]) -> Flow:
    """`worth`: array of slot types × job types, NaN for no pair. What is worth nothing is no pair either."""
    at_slot, at_job = np.nonzero(np.nan_to_num(worth, nan=0.0) > 0)
    if not len(at_slot):
        return Flow({}, (0.0,) * len(supply), (0.0,) * len(demand), 0.0)
    vertex, duals = _vertex(worth[at_slot, at_job], (at_slot, at_job + len(supply)), [*supply, *demand])
    amounts = np.rint(vertex).astype(int)
    prices = np.maximum(0.0, duals).tolist()
    used = np.flatnonzero(amounts).tolist()
    return Flow(
        {(int(at_slot[at]), int(at_job[at])): int(amounts[at]) for at in used},
        tuple(prices[: len(supply)]),
        tuple(prices[len(supply) :]),
        float(sum(worth[at_slot[at], at_job[at]] * amounts[at] for at in used)),
    )


def _vertex(worth: Any, limited: tuple[Any, Any], limits: Sequence[int]) -> tuple[Any, Any]:
    """Amounts and duals. `limited`: for each pair the two limits that it counts against."""
    try:
        from scipy.optimize import linprog  # half a second, which who only reads a plan does not pay
        from scipy.sparse import csr_array
    except ImportError as error:
        raise FleetError("the plan needs scipy: pip install 'gpuwarden[fleet]'", 3) from error
    pairs = np.arange(len(worth))
    places = (np.concatenate(limited), np.concatenate([pairs, pairs]))
    matrix = csr_array((np.ones(2 * len(worth)), places), shape=(len(limits), len(worth)))
    most = np.array(limits, dtype=float)
    message = ""
    for method in _METHODS:
        found = linprog(-worth, A_ub=matrix, b_ub=most, bounds=(0, None), method=method)
        message = found.message
        if found.success and np.abs(found.x - np.rint(found.x)).max() <= _INTEGRAL:
            return found.x, -found.ineqlin.marginals
    raise FleetError(f"the solver gave no whole pairs: report this, with the version of scipy: {message}", 3)
