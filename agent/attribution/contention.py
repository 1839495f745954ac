# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much each process gets of what it could use while several run side by side (MPS). Pure.

A process has work on the device for a share of the time, in which it would keep a share of the SMs busy if it were
alone. Others have work at the same time by chance. What happens then depends on when their blocks find room, and lies
between three rules: all that meet share the SMs in proportion to what each would use; or the kernel that began first
has all that it can use, and the others what it leaves (the block scheduler's order; of two kernels the longer one more
often began first); or the smaller grid has all that it can use, for it finds room soon, and begins only then, while a
larger one runs on what there is. Taken is the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

K = TypeVar("K")
_STEPS: Final = 20  # of the SMs, in which what others use is counted
_MOST_EXACT: Final = 8
_LARGEST_EXPONENT: Final = 1.5
_DIFFERENT: Final = 0.99
_NOTHING: Final = 1e-9  # of a device
_LEAST_LEFT: Final = 0.05  # of the activity, for those of which nobody is sure


@dataclass(frozen=True, slots=True)
class Demand:
    """Share of the time in which it has work, share of the SMs that this would use, and how long a kernel is (ns)."""

    time: float
    sms: float
    kernel_ns: float

    def beside(self, other: Demand) -> Demand:
        """Two of one owner."""
        time = self.time + other.time
        return Demand(
            time,
            (self.time * self.sms + other.time * other.sms) / time,
            (self.time * self.kernel_ns + other.time * other.kernel_ns) / time,
        )

    def mixed(self, now: Demand | None, memory: float) -> Demand:
        """After another tick; None: it did nothing in that."""
        time = self.time * memory
        if now is None or not now.time:
            return Demand(time, self.sms, self.kernel_ns)
        return Demand(time, self.sms, self.kernel_ns).beside(now.scaled_time(1 - memory))

    def scaled_time(self, factor: float) -> Demand:
        """The same work, in a part of the time."""
        return Demand(self.time * factor, self.sms, self.kernel_ns)


def shares_of_wanted(demands: Mapping[K, Demand]) -> dict[K, float]:
    """The part of time × SMs that each gets, 0–1."""
    parts = {}
    for key, mine in demands.items():
        others = [other for k, other in demands.items() if k != key]
        parts[key] = math.cbrt(_in_proportion(mine, others) * _in_order(mine, others) * _smaller_first(mine, others))
    return parts


def taking_turns(opens: Mapping[K, float]) -> dict[K, float]:
    """Share of the time that each has the device, if those that have work take turns. `opens`: how often each has."""
    return {key: time * _in_turn([other for k, other in opens.items() if k != key]) for key, time in opens.items()}


def fitted(
    demands: Mapping[K, Demand], side_by_side: Collection[K], sure: Collection[K], activity: float
) -> dict[K, float]:
    """What each gets of what it seems to have had, so that all together are what the device did.

    Where that is too much, first those of which nobody is sure are cut. Then those that are side by side: to the power
    that fits. Those that take turns are off for other reasons (the time that it takes to switch), all alike.
    """
    cut = _cut_unsure(demands, side_by_side, sure, activity)
    demands = {key: one.scaled_time(cut[key]) for key, one in demands.items()}
    parts = _shared(demands, side_by_side)
    wanted = _wanted(demands)
    given = sum(one.time * one.sms * parts[key] for key, one in demands.items())
    if not _NOTHING < activity < wanted:
        return cut
    if not 0 < given < wanted * _DIFFERENT:
        return {key: cut[key] * activity / wanted for key in demands}
    exponent = min(_LARGEST_EXPONENT, math.log(activity / wanted) / math.log(given / wanted))
    return {key: cut[key] * parts[key] ** exponent for key in demands}


def _wanted(demands: Mapping[K, Demand]) -> float:
    return sum(one.time * one.sms for one in demands.values())


def _shared(demands: Mapping[K, Demand], side_by_side: Collection[K]) -> dict[K, float]:
    clients = {key: one for key, one in demands.items() if key in side_by_side}
    parts = shares_of_wanted(clients) if len(clients) > 1 else {}
    return {key: parts.get(key, 1.0) for key in demands}


def _cut_unsure(
    demands: Mapping[K, Demand], side_by_side: Collection[K], sure: Collection[K], activity: float
) -> dict[K, float]:
    parts = _shared({key: one for key, one in demands.items() if key in sure}, side_by_side)
    known = sum(one.time * one.sms * parts[key] for key, one in demands.items() if key in sure)
    unsure = sum(one.time * one.sms for key, one in demands.items() if key not in sure)
    left = max(activity - known, _LEAST_LEFT * activity)
    cut = min(1.0, left / unsure) if sure and unsure > 0 else 1.0
    return {key: 1.0 if key in sure else cut for key in demands}


def _used(others: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Chances of how many steps of the SMs others use: each (share of SMs, chance) does so by itself."""
    chances = {0: 1.0}
    for sms, chance in others:
        step = round(min(1.0, sms) * _STEPS)
        after: dict[int, float] = {}
        for used, so_far in chances.items():
            after[used] = after.get(used, 0.0) + so_far * (1 - chance)
            after[used + step] = after.get(used + step, 0.0) + so_far * chance
        chances = after
    return chances


def _in_turn(others: Sequence[float]) -> float:
    """Mean of 1 ÷ (how many have work) for one that has."""
    if len(others) >= _MOST_EXACT:
        return 1 / (1 + sum(others))
    return sum(chance / (1 + used / _STEPS) for used, chance in _used([(1.0, time) for time in others]).items())


def _in_proportion(mine: Demand, others: Sequence[Demand]) -> float:
    """Mean of 1 ÷ (all that is wanted), where that is more than there is."""
    if len(others) >= _MOST_EXACT:
        return 1 / max(1.0, mine.sms + sum(other.time * other.sms for other in others))
    used = _used([(other.sms, min(1.0, max(0.0, other.time))) for other in others])
    return sum(chance / max(1.0, mine.sms + sms / _STEPS) for sms, chance in used.items())


def _smaller_first(mine: Demand, others: Sequence[Demand]) -> float:
    """The part that smaller grids leave; of two alike each is first half of the time."""
    before = []
    for other in others:
        first = 0.5 if abs(other.sms - mine.sms) < 1 / _STEPS else float(other.sms < mine.sms)
        if first:
            before.append((other.sms, first * min(1.0, max(0.0, other.time))))
    if not before or not mine.sms:
        return 1.0
    if len(before) >= _MOST_EXACT:
        return 1 / (1 + sum(sms * chance for sms, chance in before))
    left = ((max(0.0, 1 - used / _STEPS), chance) for used, chance in _used(before).items())
    return sum(chance * min(1.0, part / mine.sms) for part, chance in left)


def _in_order(mine: Demand, others: Sequence[Demand]) -> float:
    part = 1.0
    for other in others:
        left = max(0.0, min(1.0, (1 - other.sms) / mine.sms)) if mine.sms else 1.0
        behind = 1 - _began_first(mine.kernel_ns, other.kernel_ns)
        part *= 1 - min(1.0, max(0.0, other.time)) * behind * (1 - left)
    return part


def _began_first(mine_ns: float, other_ns: float) -> float:
    """The chance that mine is the older of two kernels that run now: each is of any age up to its length."""
    if mine_ns <= 0 or other_ns <= 0:
        return 0.5
    if mine_ns >= other_ns:
        return 1 - other_ns / (2 * mine_ns)
    return mine_ns / (2 * other_ns)
