# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The stages of a pipeline as a directed graph without cycles, its dominator tree, and the sequences in it.

Stages are numbered so that each comes after those that it waits for. A stage dominates another where every request that
reaches the other went through it, and is its postdominator the other way round. A sequence is a list of stages each of
which dominates the next and is followed by it for certain: every path takes all of them or none. So a budget for a
sequence may be spent on any of its stages, and budgets that add up along a path stay within it. Splitting an SLO over
groups out of the dominator tree is ESG's idea (HPDC'24); the dominators are found as by Cooper, Harvey and Kennedy ("A
simple, fast dominance algorithm"), and without cycles one pass in order is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.model import FleetError

LONGEST: Final = 3
"""Stages of a sequence, at most"""


@dataclass(frozen=True, slots=True)
class Graph:
    """`before[i]` and `after[i]`: the stages that come right before and right after stage i, all numbers ascending."""

    names: tuple[str, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


def graph(waits_for: Mapping[str, Sequence[str]]) -> Graph:
    """From what each stage waits for. FleetError: an unknown stage, a cycle, or no stage at all."""
    if not waits_for:
        raise FleetError("the pipeline has no stages; name one below `stages`")
    for name, earlier in waits_for.items():
        if unknown := [other for other in earlier if other not in waits_for]:
            raise FleetError(
                f"stage {name!r} comes after {unknown[0]!r}, which is no stage; there are: {', '.join(waits_for)}"
            )
    order = _ordered(waits_for)
    number = {name: index for index, name in enumerate(order)}
    before = tuple(tuple(sorted({number[other] for other in waits_for[name]})) for name in order)
    after = tuple(tuple(index for index, ends in enumerate(before) if stage in ends) for stage in range(len(order)))
    return Graph(tuple(order), before, after)


def _ordered(waits_for: Mapping[str, Sequence[str]]) -> list[str]:
    order: list[str] = []
    left = dict(waits_for)
    while left:
        ready = [name for name, earlier in left.items() if not any(other in left for other in earlier)]
        if not ready:
            raise FleetError(f"the stages {' → '.join(_cycle(left))} wait for each other; remove one `after` of them")
        order += ready
        for name in ready:
            del left[name]
    return order


def _cycle(left: Mapping[str, Sequence[str]]) -> list[str]:
    """A cycle among stages each of which waits for another of them, in the order in which requests would go."""
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(other for other in left[path[-1]] if other in left))
    return path[path.index(path[-1]) :][::-1]


def dominators(before: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Of each stage the nearest one that dominates it; -1: none but the pipeline's entry."""
    nearest: list[int] = []
    for earlier in before:
        found = earlier[0] if earlier else -1
        for other in earlier[1:]:
            found = _meet(nearest, found, other)
        nearest.append(found)
    return tuple(nearest)


def _meet(nearest: Sequence[int], one: int, other: int) -> int:
    while one != other:  # a dominator has the smaller number
        one, other = (nearest[one], other) if one > other else (one, nearest[other])
    return one


def postdominators(pipeline: Graph) -> tuple[int, ...]:
    """Of each stage the nearest one that every request goes through after it; -1: none but the pipeline's end."""
    last = len(pipeline.names) - 1
    turned = [[last - other for other in reversed(pipeline.after[last - stage])] for stage in range(last + 1)]
    nearest = dominators(turned)
    return tuple(-1 if nearest[last - stage] < 0 else last - nearest[last - stage] for stage in range(last + 1))


def sequences(pipeline: Graph, longest: int = LONGEST) -> tuple[tuple[int, ...], ...]:
    """The stages in sequences of at most `longest`, each stage in exactly one."""
    up, down = dominators(pipeline.before), postdominators(pipeline)
    found: list[list[int]] = []
    place: dict[int, list[int]] = {}
    for stage in range(len(pipeline.names)):
        parent = up[stage]
        if parent >= 0 and down[parent] == stage and len(place[parent]) < longest:
            place[stage] = place[parent]
        else:
            place[stage] = []
            found.append(place[stage])
        place[stage].append(stage)
    return tuple(tuple(sequence) for sequence in found)


def longest_path(pipeline: Graph, lengths: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of each stage the longest path up to its end and from its end on."""
    until: list[float] = []
    for stage, earlier in enumerate(pipeline.before):
        until.append(lengths[stage] + max((until[other] for other in earlier), default=0.0))
    beyond = [0.0] * len(lengths)
    for stage in reversed(range(len(lengths))):
        beyond[stage] = max((beyond[other] + lengths[other] for other in pipeline.after[stage]), default=0.0)
    return tuple(until), tuple(beyond)
