# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much each process gets of what it could use while several run side by side (MPS). Pure.

A process has work on the device for a share of the time, in which it would keep a share of the SMs busy if it were alone.
Others have work at the same time by chance; those that meet share the SMs in proportion to what each would use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

K = TypeVar("K")
_STEPS: Final = 20  # of the SMs, in which what others use is counted
_MOST: Final = 4 * _STEPS
_MOST_EXACT: Final = 16
_LARGEST_EXPONENT: Final = 1.5


def shares_of_wanted(demands: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """(share of time, share of SMs) of each → the part of that product that it gets, 0–1."""
    if len(demands) > _MOST_EXACT:
        total = sum(time * sms for time, sms in demands.values())
        return {key: 1 / max(1.0, sms + total - time * sms) for key, (time, sms) in demands.items()}
    return {key: _part(sms, [other for k, other in demands.items() if k != key]) for key, (_, sms) in demands.items()}


def _part(sms: float, others: list[tuple[float, float]]) -> float:
    """Mean of 1 ÷ (all that is wanted), where that is more than there is, over who of the others has work."""
    chances = {0: 1.0}
    for time, wanted in others:
        step, time = round(min(1.0, wanted) * _STEPS), min(1.0, max(0.0, time))
        after: dict[int, float] = {}
        for used, chance in chances.items():
            after[used] = after.get(used, 0.0) + chance * (1 - time)
            more = min(_MOST, used + step)
            after[more] = after.get(more, 0.0) + chance * time
        chances = after
    return sum(chance / max(1.0, sms + used / _STEPS) for used, chance in chances.items())


def fitted(demands: Mapping[K, tuple[float, float]], activity: float) -> dict[K, float]:
    """The same, to the power with which all together are what the device did: 0 where processes take turns."""
    parts = shares_of_wanted(demands)
    wanted = sum(time * sms for time, sms in demands.values())
    given = sum(time * sms * parts[key] for key, (time, sms) in demands.items())
    if not 0 < activity < wanted or not given < wanted:
        return dict.fromkeys(parts, 1.0)
    exponent = min(_LARGEST_EXPONENT, math.log(activity / wanted) / math.log(given / wanted))
    return {key: part**exponent for key, part in parts.items()}
