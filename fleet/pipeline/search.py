# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Chooses one level for each stage so that most is left and no path is longer than the budget: best first, with bounds.

A partial choice fixes the first stages. It is dropped by time, when what it takes and the least that the stages to come
take exceed the budget, and by what is left, when even the most that those can leave is no better than a choice that is
known: the two prunings of a path search as in ESG. What the stages to come can leave at most is the Lagrangian bound of
the problem: with a price w_P ≥ 0 on the time of each path P, Σ_stage max_level (offline − latency · Σ_{P ∋ stage} w_P)
+ Σ_P w_P · (budget − time so far on P) is never below it, whatever the prices are. A third rule drops what was reached
before as early with all stages that later ones wait for; at a stage that all others come after, that is one number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fleet.pipeline.dominators import Graph, longest_path

ROUNDING: Final = 1 + 1e-12
"""Sums of latencies in another order differ by less"""
_ROUNDS: Final = 12  # of improving the prices; more tighten the bound by less than they cost
_MOST_SEEN: Final = 64  # choices that a new one is compared with; more cost more than they drop
_MOST_TRIED: Final = 8  # open choices that are completed where the search has to end early
_PRICED: Final = 4  # stages from which on the prices are worth finding


@dataclass(frozen=True, slots=True)
class Level:
    """What a stage can promise, and what that leaves."""

    latency_s: float
    offline: float
    """Throughput of offline work beside it, relative to alone, 0 to 1"""


@dataclass(frozen=True, slots=True)
class Problem:
    """Stages by number, each with its useful levels, fastest first."""

    shape: Graph
    levels: tuple[tuple[Level, ...], ...]
    budget_s: float

    def fastest_s(self) -> list[float]:
        return [levels[0].latency_s for levels in self.levels]

    def latencies_s(self, choice: Sequence[int]) -> list[float]:
        return [levels[index].latency_s for levels, index in zip(self.levels, choice, strict=True)]

    def offline(self, choice: Sequence[int]) -> float:
        return math.fsum(levels[index].offline for levels, index in zip(self.levels, choice, strict=True))

    def fits(self, choice: Sequence[int]) -> bool:
        until_s, _ = longest_path(self.shape, self.latencies_s(choice))
        return max(until_s) <= self.budget_s * ROUNDING

    def path_s(self, path: Sequence[int], choice: Sequence[int]) -> float:
        return math.fsum(self.levels[stage][choice[stage]].latency_s for stage in path)

    def longest(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The longest path, in its order."""
        until_s, _ = longest_path(self.shape, self.latencies_s(choice))
        path = [max(range(len(until_s)), key=until_s.__getitem__)]
        while earlier := self.shape.before[path[-1]]:
            path.append(max(earlier, key=until_s.__getitem__))
        return tuple(reversed(path))


def search(problem: Problem, start: tuple[int, ...], most_steps: int) -> tuple[tuple[int, ...], bool, int]:
    """Best first from the first stage on: the best choice, whether it is the optimum, and the steps taken.

    An entry of the heap is (−bound, −stages chosen, what they leave, their levels, when each of them is done).
    """
    count = len(problem.levels)
    _, beyond_s = longest_path(problem.shape, problem.fastest_s())
    bound = _bound(problem, problem.offline(start))
    waited = [
        [s for s in range(depth) if any(t >= depth for t in problem.shape.after[s])] for depth in range(count + 1)
    ]
    best, best_offline = start, problem.offline(start) + 1e-12
    seen: list[list[tuple[float, ...]]] = [[] for _ in range(count + 1)]
    heap: list[tuple[float, int, float, tuple[int, ...], tuple[float, ...]]] = [(-bound.most(()), 0, 0.0, (), ())]
    steps = 0
    while heap:
        least, order, offline, chosen, done_s = heapq.heappop(heap)
        depth = -order
        if -least <= best_offline:
            break  # the heap's best is no better than what is known, so nothing in it is
        if depth == count:
            return chosen, True, steps
        if _beaten(seen[depth], (-offline, *(done_s[stage] for stage in waited[depth]))):
            continue
        if steps == most_steps:
            open_ones = [chosen, *(entry[3] for entry in heapq.nsmallest(_MOST_TRIED - 1, heap))]
            return max(best, *(_completed(problem, chosen) for chosen in open_ones), key=problem.offline), False, steps
        steps += 1
        begin_s = max((done_s[earlier] for earlier in problem.shape.before[depth]), default=0.0)
        for index, level in enumerate(problem.levels[depth]):
            ends_s = (*done_s, begin_s + level.latency_s)
            if ends_s[depth] + beyond_s[depth] > problem.budget_s * ROUNDING:
                break  # by time; the next levels are slower
            most = offline + level.offline + bound.most(ends_s)
            if most > best_offline:  # else dropped by what is left
                heapq.heappush(heap, (-most, order - 1, offline + level.offline, (*chosen, index), ends_s))
    return best, True, steps


def _completed(problem: Problem, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """With the fastest levels behind it, which always fit, and then raised."""
    return raised(problem, (*chosen, *(0,) * (len(problem.levels) - len(chosen))))


def raised(problem: Problem, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Uses up what is left of the budget: raises one stage at a time to its next level, best gain per time first."""
    current = list(choice)
    while True:
        until_s, beyond_s = longest_path(problem.shape, problem.latencies_s(current))
        steps = []
        for stage, levels in enumerate(problem.levels):
            if current[stage] + 1 < len(levels):
                now, then = levels[current[stage]], levels[current[stage] + 1]
                more_s = then.latency_s - now.latency_s
                if until_s[stage] + beyond_s[stage] + more_s <= problem.budget_s:
                    steps.append(((then.offline - now.offline) / more_s, stage))
        if not steps:
            return tuple(current)
        current[max(steps)[1]] += 1


@dataclass(frozen=True, slots=True)
class _Bound:
    """What the stages from one on can leave at most."""

    paths: tuple[tuple[int, ...], ...]
    prices: tuple[float, ...]
    """Of a second on each of the paths"""
    rest: tuple[float, ...]
    """At each stage: the most that it and the later ones leave, less what their time costs"""
    last: tuple[tuple[int, ...], ...]
    """At each number of stages chosen: the last of them on each path, −1: none is"""
    budget_s: float

    def most(self, done_s: Sequence[float]) -> float:
        """By the stages after the first ones, which are done at these times."""
        depth = len(done_s)
        if depth == len(self.rest) - 1:
            return 0.0
        total = self.rest[depth]
        for price, stage in zip(self.prices, self.last[depth], strict=True):
            total += price * (self.budget_s - (done_s[stage] if stage >= 0 else 0.0))
        return total


def _bound(problem: Problem, known: float) -> _Bound:
    """With prices by subgradients, each step as long as if the optimum was `known` (Polyak's rule)."""
    prices: dict[tuple[int, ...], float] = {}
    best, least = dict(prices), math.inf
    for _ in range(_ROUNDS if len(problem.levels) >= _PRICED else 1):
        choice = _priced_choice(problem, prices)
        over_s = {path: problem.path_s(path, choice) - problem.budget_s for path in prices}
        longest = problem.longest(choice)
        over_s[longest] = problem.path_s(longest, choice) - problem.budget_s
        value = problem.offline(choice) - math.fsum(prices[path] * over_s[path] for path in prices)
        if value < least:
            best, least = dict(prices), value
        steepness = math.fsum(over * over for path, over in over_s.items() if over > 0 or prices.get(path, 0.0) > 0)
        if not steepness or value - known <= 1e-12:
            break
        for path, over in over_s.items():
            prices[path] = max(0.0, prices.get(path, 0.0) + (value - known) / steepness * over)
    return _with_prices(problem, {path: price for path, price in best.items() if price > 0})


def _with_prices(problem: Problem, prices: dict[tuple[int, ...], float]) -> _Bound:
    count = len(problem.levels)
    costs = _costs(count, prices)
    most = [
        max(level.offline - cost * level.latency_s for level in levels)
        for levels, cost in zip(problem.levels, costs, strict=True)
    ]
    rest = tuple(math.fsum(most[stage:]) for stage in range(count + 1))
    last = tuple(
        tuple(max((stage for stage in path if stage < depth), default=-1) for path in prices)
        for depth in range(count + 1)
    )
    return _Bound(tuple(prices), tuple(prices.values()), rest, last, problem.budget_s * ROUNDING)


def _costs(count: int, prices: dict[tuple[int, ...], float]) -> list[float]:
    """Of a second of each stage: the sum of the prices of the paths through it."""
    costs = [0.0] * count
    for path, price in prices.items():
        for stage in path:
            costs[stage] += price
    return costs


def _priced_choice(problem: Problem, prices: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    costs = _costs(len(problem.levels), prices)
    return tuple(
        max(range(len(levels)), key=lambda index: levels[index].offline - cost * levels[index].latency_s)
        for levels, cost in zip(problem.levels, costs, strict=True)
    )


def _beaten(seen: list[tuple[float, ...]], state: tuple[float, ...]) -> bool:
    """Whether a choice for as many stages leaves as much and is done as early with all that later ones wait for."""
    if any(all(ours >= theirs for ours, theirs in zip(state, other, strict=True)) for other in seen):
        return True
    if len(seen) < _MOST_SEEN:
        seen.append(state)
    return False
