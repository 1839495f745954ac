# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Splits a pipeline's SLO over its stages so that most offline throughput is left on their GPUs.

Each stage has levels: a latency, and what offline work gets beside the stage when that latency is its SLO. One level is
chosen for each stage; the longest path of their latencies stays within the SLO, and the sum of what is left is as large
as can be. As in ESG, a path is searched best first with two prunings: a choice is dropped when its time and the least
time of the stages to come exceed the budget, and when what it leaves and the most that those can leave are no better
than a choice that is known.

First each sequence of the dominator tree is searched within a budget of its own, by its mean normalised latency; what
is then left of the SLO is used up, best gain first. That alone can miss the optimum, as budgets are set before levels
are known, so it is only what the search over the whole pipeline starts from. This one is exact unless it reaches its
bound of steps, and says which.

Latencies are taken as they are: if each is a p99, at most n % of the requests miss the sum over n stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.model import FleetError
from fleet.pipeline.dominators import Graph, graph, longest_path, sequences
from fleet.pipeline.search import ROUNDING, Level, Problem, raised, search

MOST_STAGES: Final = 64
MOST_LEVELS: Final = 64
MOST_STEPS: Final = 150
"""Of the search over the whole pipeline: about 10 ms with 8 stages of 8 levels"""
DEAD_BAND: Final = 0.1


@dataclass(frozen=True, slots=True)
class Stage:
    """A service of the pipeline."""

    name: str
    levels: tuple[Level, ...]
    after: tuple[str, ...] = ()
    """Stages that it waits for"""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Services that one request goes through."""

    slo_s: float
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage's part of the SLO."""

    name: str
    slo_s: float
    """At least the level's latency: what the path leaves is given out too"""
    level: Level


@dataclass(frozen=True, slots=True)
class Split:
    """A part for each stage, in an order in which requests can go."""

    parts: tuple[Part, ...]
    offline: float
    """Sum over the stages"""
    exact: bool
    """Whether no other choice of levels leaves more"""
    steps: int
    """Of the search over the whole pipeline"""


def split(pipeline: Pipeline, most_steps: int = MOST_STEPS) -> Split:
    """The best split. FleetError: the pipeline is not valid, or no choice of levels meets the SLO."""
    _check(pipeline)
    shape = graph({stage.name: stage.after for stage in pipeline.stages})
    by_name = {stage.name: stage for stage in pipeline.stages}
    problem = Problem(shape, tuple(_useful(by_name[name].levels) for name in shape.names), pipeline.slo_s)
    _check_possible(problem)
    start = raised(problem, _by_sequences(problem))
    choice, exact, steps = search(problem, start, most_steps)
    latencies_s = problem.latencies_s(choice)
    until_s, beyond_s = longest_path(shape, latencies_s)
    parts = tuple(
        # Divided by the longest path through the stage, the parts add up to at most 1 along any path.
        Part(name, latencies_s[stage] * pipeline.slo_s / (until_s[stage] + beyond_s[stage]), levels[choice[stage]])
        for stage, (name, levels) in enumerate(zip(shape.names, problem.levels, strict=True))
    )
    return Split(parts, problem.offline(choice), exact, steps)


def settled(pipeline: Pipeline, before_s: Mapping[str, float], found: Split, band: float = DEAD_BAND) -> bool:
    """Whether the SLOs in use may stay: they still fit, and the new ones differ by at most `band` of them."""
    if set(before_s) != {part.name for part in found.parts}:
        return False
    shape = graph({stage.name: stage.after for stage in pipeline.stages})
    until_s, _ = longest_path(shape, [before_s[name] for name in shape.names])
    fast = all(min(level.latency_s for level in stage.levels) <= before_s[stage.name] for stage in pipeline.stages)
    near = all(abs(part.slo_s - before_s[part.name]) <= band * before_s[part.name] for part in found.parts)
    return fast and near and max(until_s) <= pipeline.slo_s * ROUNDING


def _check(pipeline: Pipeline) -> None:
    names = [stage.name for stage in pipeline.stages]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FleetError(f"two stages are called {twice[0]!r}; rename one")
    if len(names) > MOST_STAGES:
        raise FleetError(f"the pipeline has {len(names)} stages; at most {MOST_STAGES} can be split")
    if not (math.isfinite(pipeline.slo_s) and pipeline.slo_s > 0):
        raise FleetError("the pipeline's SLO has to be a time above 0")
    for stage in pipeline.stages:
        if not 0 < len(stage.levels) <= MOST_LEVELS:
            raise FleetError(f"stage {stage.name!r} has {len(stage.levels)} levels; give 1 to {MOST_LEVELS}")
        for level in stage.levels:
            if not (math.isfinite(level.latency_s) and level.latency_s > 0 and 0 <= level.offline <= 1):
                raise FleetError(
                    f"stage {stage.name!r} has a level of {level.latency_s:g} s and {level.offline:g} offline: "
                    "a latency is above 0, and offline is 0 to 1"
                )


def _useful(levels: Sequence[Level]) -> tuple[Level, ...]:
    """Fastest first, without those that are slower than another and leave no more."""
    kept: list[Level] = []
    for level in sorted(levels, key=lambda level: (level.latency_s, -level.offline)):
        if not kept or level.offline > kept[-1].offline:
            kept.append(level)
    return tuple(kept)


def _check_possible(problem: Problem) -> None:
    fastest_s = problem.fastest_s()
    until_s, _ = longest_path(problem.shape, fastest_s)
    if max(until_s) <= problem.budget_s * ROUNDING:
        return
    names = " → ".join(problem.shape.names[stage] for stage in problem.longest((0,) * len(fastest_s)))
    raise FleetError(
        f"no split meets the SLO of {problem.budget_s * 1e3:g} ms: {names} takes {max(until_s) * 1e3:g} ms at the "
        "fastest levels; raise the SLO, or give one of these stages a faster level"
    )


def _by_sequences(problem: Problem) -> tuple[int, ...]:
    """The best of each sequence within its own budget; all stages at their fastest if one's budget is too short."""
    means_s = [math.fsum(level.latency_s for level in levels) / len(levels) for levels in problem.levels]
    until_s, beyond_s = longest_path(problem.shape, means_s)
    choice = [0] * len(means_s)
    for sequence in sequences(problem.shape):
        ratio = math.fsum(means_s[stage] / (until_s[stage] + beyond_s[stage]) for stage in sequence)
        chain = _chain(problem, sequence, problem.budget_s * ratio)
        start = (0,) * len(sequence)
        if not chain.fits(start):
            return (0,) * len(choice)
        found, _, _ = search(chain, start, MOST_STEPS)
        for stage, index in zip(sequence, found, strict=True):
            choice[stage] = index
    return tuple(choice)


def _chain(problem: Problem, sequence: Sequence[int], budget_s: float) -> Problem:
    count = len(sequence)
    shape = Graph(
        tuple(problem.shape.names[stage] for stage in sequence),
        tuple((index - 1,) if index else () for index in range(count)),
        tuple((index + 1,) if index + 1 < count else () for index in range(count)),
    )
    return Problem(shape, tuple(problem.levels[stage] for stage in sequence), budget_s)
