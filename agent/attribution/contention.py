# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much SM time each process gets of what it could use, where several share a device. Pure.

A process has work on the device for a part of the time, in which it would keep a part of the SMs busy if it were alone.
With MPS others have work at the same time by chance. What happens then depends on when their blocks find room, and lies
between three rules: all that overlap share the SMs in proportion to what each would use; or the kernel that began first
has all that it can use, and the others what it leaves (the block scheduler's order; of two kernels the longer one more
often began first); or the smaller grid has all that it can use, as it finds room soon, and begins only then, while a
larger one runs on what there is. The geometric mean of the three is taken. Without MPS processes take turns.

Also here: which part of a device's SMs a launch keeps busy while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

K = TypeVar("K")
_STEPS: Final = 20  # of the SMs, in which what others use is counted
_MOST_EXACT: Final = 8
_LARGEST_EXPONENT: Final = 1.5
_DIFFERENT: Final = 0.99
_NEGLIGIBLE: Final = 1e-9  # of a device
_LEAST_LEFT: Final = 0.05  # of the activity, for processes with uncertain figures


class SmDemand(NamedTuple):
    """Share of the time in which it has work, share of the SMs that this would use, and how long a kernel is (ns)."""

    time: float
    sms: float
    kernel_ns: float

    def combined(self, other: SmDemand) -> SmDemand:
        """The demand of both together."""
        time = self.time + other.time
        return SmDemand(
            time,
            (self.time * self.sms + other.time * other.sms) / time,
            (self.time * self.kernel_ns + other.time * other.kernel_ns) / time,
        )

    def averaged(self, now: SmDemand | None, memory: float) -> SmDemand:
        """The moving average after another tick; None: no work in that. `memory`: weight of the past, 0–1."""
        time = self.time * memory
        if now is None or not now.time:
            return SmDemand(time, self.sms, self.kernel_ns)
        return SmDemand(time, self.sms, self.kernel_ns).combined(now.scaled_time(1 - memory))

    def scaled_time(self, factor: float) -> SmDemand:
        """The same work, in a part of the time."""
        return SmDemand(self.time * factor, self.sms, self.kernel_ns)


def shares_side_by_side(demands: Mapping[K, SmDemand]) -> dict[K, float]:
    """With MPS: the part of its time × SMs that each gets, 0–1."""
    parts, all_ = {}, list(demands.values())
    for at, (key, mine) in enumerate(demands.items()):
        others = all_[:at] + all_[at + 1 :]
        parts[key] = math.cbrt(_in_proportion(mine, others) * _in_order(mine, others) * _smaller_first(mine, others))
    return parts


def shares_in_turns(opens: Mapping[K, float]) -> dict[K, float]:
    """Share of the time that each has the device, if they take turns. `opens`: share of the time that each has work."""
    if len(opens) > _MOST_EXACT:
        total = sum(opens.values())
        return {key: time / (1 + total - time) for key, time in opens.items()}
    times = list(opens.values())
    return {key: time * _in_turn(times[:at] + times[at + 1 :]) for at, (key, time) in enumerate(opens.items())}


def fit_to_activity(
    demands: Mapping[K, SmDemand], side_by_side: Collection[K], certain: Collection[K], activity: float
) -> dict[K, float]:
    """The part of its demand that each got, so that their sum is the activity of the device.

    Where the sum is too large, first the demands that are not `certain` are cut. Then those of MPS clients
    (`side_by_side`), by the exponent that fits. The error of those that take turns has other causes (switching takes
    time): they are scaled alike.
    """
    cut = _cut_uncertain(demands, side_by_side, certain, activity)
    demands = {key: one.scaled_time(cut[key]) for key, one in demands.items()}
    parts = _shared(demands, side_by_side)
    wanted = _wanted(demands)
    given = sum(one.time * one.sms * parts[key] for key, one in demands.items())
    if not _NEGLIGIBLE < activity < wanted:
        return cut
    if not 0 < given < wanted * _DIFFERENT:
        return {key: cut[key] * activity / wanted for key in demands}
    exponent = min(_LARGEST_EXPONENT, math.log(activity / wanted) / math.log(given / wanted))
    return {key: cut[key] * parts[key] ** exponent for key in demands}


def _wanted(demands: Mapping[K, SmDemand]) -> float:
    return sum(one.time * one.sms for one in demands.values())


def _shared(demands: Mapping[K, SmDemand], side_by_side: Collection[K]) -> dict[K, float]:
    clients = {key: one for key, one in demands.items() if key in side_by_side}
    parts = shares_side_by_side(clients) if len(clients) > 1 else {}
    return {key: parts.get(key, 1.0) for key in demands}


def _cut_uncertain(
    demands: Mapping[K, SmDemand], side_by_side: Collection[K], certain: Collection[K], activity: float
) -> dict[K, float]:
    parts = _shared({key: one for key, one in demands.items() if key in certain}, side_by_side)
    known = sum(one.time * one.sms * parts[key] for key, one in demands.items() if key in certain)
    uncertain = sum(one.time * one.sms for key, one in demands.items() if key not in certain)
    left = max(activity - known, _LEAST_LEFT * activity)
    cut = min(1.0, left / uncertain) if certain and uncertain > 0 else 1.0
    return {key: 1.0 if key in certain else cut for key in demands}


def _used(others: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Distribution of the steps of the SMs that others use: each (share of SMs, chance) independently."""
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
    """Mean of 1 ÷ (number of processes with work), for one that has work."""
    chances = [1.0]  # by the number of others with work
    for time in others:
        one_more = zip([*chances, 0.0], [0.0, *chances], strict=True)
        chances = [same * (1 - time) + fewer * time for same, fewer in one_more]
    return sum(chance / (1 + count) for count, chance in enumerate(chances))


def _in_proportion(mine: SmDemand, others: Sequence[SmDemand]) -> float:
    """Mean of 1 ÷ (sum of what is wanted), where that is more than the device."""
    if len(others) >= _MOST_EXACT:
        return 1 / max(1.0, mine.sms + sum(other.time * other.sms for other in others))
    used = _used([(other.sms, min(1.0, max(0.0, other.time))) for other in others])
    return sum(chance / max(1.0, mine.sms + sms / _STEPS) for sms, chance in used.items())


def _smaller_first(mine: SmDemand, others: Sequence[SmDemand]) -> float:
    """The part that smaller grids leave; of two equal ones each is first half of the time."""
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


def _in_order(mine: SmDemand, others: Sequence[SmDemand]) -> float:
    """The part that kernels which began earlier leave."""
    part = 1.0
    for other in others:
        if mine.sms + other.sms <= 1:
            continue
        left = max(0.0, min(1.0, (1 - other.sms) / mine.sms)) if mine.sms else 1.0
        behind = 1 - _began_first(mine.kernel_ns, other.kernel_ns)
        part *= 1 - min(1.0, max(0.0, other.time)) * behind * (1 - left)
    return part


def _began_first(mine_ns: float, other_ns: float) -> float:
    """The chance that mine is the older of two running kernels, each of any age up to its length."""
    if mine_ns <= 0 or other_ns <= 0:
        return 0.5
    if mine_ns >= other_ns:
        return 1 - other_ns / (2 * mine_ns)
    return mine_ns / (2 * other_ns)


_THREADS_PER_SM = 2048  # V100 to B200; consumer parts hold 1,536, which makes this a little low there
_BLOCKS_PER_SM = 32


def waves(blocks: float, threads_per_block: int, sm_count: int) -> tuple[float, float]:
    """The number of waves of a launch, and Σ SMs that each wave keeps busy. bpf/waves.bpf.h computes the same.

    Blocks are spread over the SMs first and stacked then, so up to one block per SM every block takes an SM.
    """
    per_sm = max(1, min(_BLOCKS_PER_SM, _THREADS_PER_SM // max(1, threads_per_block)))
    full, rest = divmod(blocks, sm_count * per_sm)
    return full + (1 if rest else 0), full * sm_count + min(rest, sm_count)


@lru_cache(4096)
def sm_fraction(blocks: float, threads_per_block: int, sm_count: int | None) -> float:
    """Mean share of the SMs over the launch's waves, 0–1; 1 where the device's SM count is unknown."""
    if not sm_count or blocks <= 0:
        return 1.0
    count, busy = waves(blocks, threads_per_block, sm_count)
    return min(1.0, busy / (count * sm_count))
