# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How far a plan can be from the optimum, without solving the dense problem.

Invariant: the bound is at least the optimum over slots and jobs as they are, whatever the prices. By weak duality of
the assignment problem: with prices p ≥ 0 on the jobs, each slot gains at most max(0, max_j(c_ij − p_j)), and
Σ_j p_j + Σ_i of that is at least the value of any matching. The prices of the types' problem make it nearly tight.
A type's jobs are taken at the weight of the easiest of them, so that no member is worth more; the predictor has to keep
to what `Predictor.weight` promises for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fleet.match.types import JobGroup, rows
from fleet.model import Predictor, Slot


def easiest_weights(predictor: Predictor, slots: Sequence[Slot], groups: Sequence[JobGroup], weights: Any) -> Any:
    """Array of slots × job types, for the easiest job of each. `weights`: the same for the hardest."""
    differing = [at for at, group in enumerate(groups) if not group.alike]
    if not differing:
        return weights
    found = weights.copy()
    found[:, differing] = rows(predictor, slots, [groups[at].easiest for at in differing])
    return found


def upper_bound(worth: Any, prices: Sequence[float], demand: Sequence[int]) -> float:
    """`worth`: array of slots × job types, of the easiest job of each; NaN for no pair."""
    if not worth.size:
        return 0.0
    price = np.maximum(0.0, np.asarray(prices, dtype=float))
    surplus = np.nan_to_num(worth - price, nan=0.0).max(axis=1)
    return float(np.maximum(0.0, surplus).sum() + (price * np.asarray(demand)).sum())
