# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The transport problem: how many jobs of each type go to slots of each type, for the greatest total.

max Σ c_ab·y_ab, Σ_b y_ab ≤ supply_a, Σ_a y_ab ≤ demand_b, y ≥ 0. Invariant: the result is integral. The matrix is a
bipartite incidence matrix, so totally unimodular, and the right sides are integers: each vertex is integral (Hoffman
and Kruskal, 1956), and the dual simplex of HiGHS ends in a vertex. That is checked all the same. Its duals are the
prices: what one more slot, or one more job, of a type would add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fleet.model import FleetError

_INTEGRAL: Final = 1e-6


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
    found = _solved(worth[at_slot, at_job], (at_slot, at_job + len(supply)), [*supply, *demand])
    amounts = np.rint(found.x).astype(int)
    if np.abs(found.x - amounts).max() > _INTEGRAL:
        raise FleetError("the solver gave parts of pairs: report this, with the version of scipy", 3)
    prices = np.maximum(0.0, -found.ineqlin.marginals).tolist()
    used = np.flatnonzero(amounts).tolist()
    return Flow(
        {(int(at_slot[at]), int(at_job[at])): int(amounts[at]) for at in used},
        tuple(prices[: len(supply)]),
        tuple(prices[len(supply) :]),
        float(sum(worth[at_slot[at], at_job[at]] * amounts[at] for at in used)),
    )


def _solved(worth: Any, limited: tuple[Any, Any], limits: Sequence[int]) -> Any:
    """`limited`: for each pair the two limits that it counts against."""
    try:
        from scipy.optimize import linprog  # half a second, which who only reads a plan does not pay
        from scipy.sparse import csr_array
    except ImportError as error:
        raise FleetError("the plan needs scipy: pip install 'gpuwarden[fleet]'", 3) from error
    pairs = np.arange(len(worth))
    places = (np.concatenate(limited), np.concatenate([pairs, pairs]))
    matrix = csr_array((np.ones(2 * len(worth)), places), shape=(len(limits), len(worth)))
    found = linprog(
        -worth,
        A_ub=matrix,
        b_ub=np.array(limits, dtype=float),
        bounds=(0, None),
        method="highs-ds",
        options={"simplex_dual_edge_weight_strategy": "devex"},  # half of the default's time on such tables
    )
    if not found.success:
        raise FleetError(f"the solver gave up: {found.message}", 3)
    return found
