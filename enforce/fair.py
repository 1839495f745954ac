# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How what offline work may use of a device is split between those who want it: weighted, and nothing is left lying.

Weighted max-min fairness, found by filling (Bertsekas and Gallager, Data Networks, §6.5.2): who wants less than its$
part has what it wants, and the others share the rest by weight. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Who = TypeVar("Who")
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Claim:
    """`weight` > 0; `wanted` is a fraction 0–1 of what there is to split; 1 where nobody knows."""

    weight: float
    wanted: float = 1.0


def parts(claims: Mapping[Who, Claim]) -> dict[Who, float]:
    """Fractions 0–1 with a sum of at most 1, and of 1 where the claims together want it."""
    given = dict.fromkeys(claims, 0.0)
    open_claims = {who: claim for who, claim in claims.items() if claim.wanted > 0}
    left = 1.0
    while open_claims and left > _EPSILON:
        weights = sum(claim.weight for claim in open_claims.values())
        fill = {who: claim.weight / weights * left for who, claim in open_claims.items()}
        content = {who: claim for who, claim in open_claims.items() if claim.wanted <= fill[who] + _EPSILON}
        if not content:
            return given | fill
        for who, claim in content.items():
            given[who] = claim.wanted
            left -= claim.wanted
            del open_claims[who]
    return given
