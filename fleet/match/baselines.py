# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a plan is held against: a pod at a time, in the order in which they wait, none looked ahead to.

Invariant: each sees the same weights as the plan, uses no slot twice and places a job whenever a slot that can run it
is left; so a gain over them is that of looking at all at once. All take an array of slots × job types (NaN: no pair)
and each job's column in it, and give each job's slot, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Final

import numpy as np

Placement = list[int | None]

_CHUNK: Final = 64


def first_fit(weights: Any, columns: Sequence[int]) -> Placement:
    """The first slot left that can run it."""
    return _in_order(weights, columns, lambda column: np.arange(len(weights)))


def random(weights: Any, columns: Sequence[int], seed: int) -> Placement:
    """Any slot left that can run it: the first one in an order that is drawn once."""
    order = list(range(len(weights)))
    Random(seed).shuffle(order)
    drawn = np.array(order, dtype=int)
    return _in_order(weights, columns, lambda column: drawn)


def greedy(weights: Any, columns: Sequence[int]) -> Placement:
    """The slot left in which it runs fastest; of equal ones the first."""
    return _in_order(weights, columns, lambda column: np.argsort(-weights[:, column], kind="stable"))


def _in_order(weights: Any, columns: Sequence[int], order: Callable[[int], Any]) -> Placement:
    """Walks each column's order once, as a slot that is taken stays taken."""
    taken = np.zeros(len(weights), dtype=bool)
    left: dict[int, Any] = {}
    found: Placement = []
    for column in columns:
        if column not in left:
            slots = order(column)
            left[column] = slots[weights[slots, column] > 0]  # NaN compares as false
        left[column], slot = _next(left[column], taken)
        found.append(slot)
        if slot is not None:
            taken[slot] = True
    return found


def _next(order: Any, taken: Any) -> tuple[Any, int | None]:
    """The rest of the order, and the first slot in it that is not taken."""
    start = 0
    while start < len(order):
        free = ~taken[order[start : start + _CHUNK]]
        first = int(free.argmax())
        if free[first]:
            return order[start + first :], int(order[start + first])
        start += _CHUNK
    return order[:0], None


BASELINES: Final[Mapping[str, Callable[[Any, Sequence[int], int], Placement]]] = MappingProxyType(
    {
        "random": random,
        "first_fit": lambda weights, columns, seed: first_fit(weights, columns),
        "greedy": lambda weights, columns, seed: greedy(weights, columns),
    }
)
"""Name → weights, columns, seed → placement"""
