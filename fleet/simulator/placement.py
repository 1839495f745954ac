# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which GPUs a gang gets, and which gangs fit together.

A job of at most a node's GPUs lies on one node, a larger one on whole nodes and at most one part of a node: so does
every scheduler that we compare (Muri's and Tiresias' placement "yarn"). A cluster without nodes is one node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fleet.simulator.cluster import Act, Active, Cluster, Preempt, Start


def pick(size: int, ranks: Mapping[int, float], gpus_per_node: int) -> tuple[int, ...] | None:
    """`size` of the GPUs in `ranks`, lower ranks first. None: they are too few, or too scattered.

    Among nodes whose worst GPU ranks alike it is the one with the fewest GPUs to choose from, as large gaps are rarer.
    """
    if len(ranks) < size:
        return None
    nodes: dict[int, list[int]] = {}
    for gpu in sorted(ranks, key=lambda gpu: (ranks[gpu], gpu)):
        nodes.setdefault(gpu // gpus_per_node, []).append(gpu)
    taken: list[int] = []
    for part in _parts(size, gpus_per_node):
        able = [node for node, gpus in nodes.items() if len(gpus) >= part]
        if not able:
            return None
        best = min(able, key=lambda node: (ranks[nodes[node][part - 1]], len(nodes[node]), node))
        taken += nodes.pop(best)[:part]
    return tuple(sorted(taken))


def _parts(size: int, gpus_per_node: int) -> list[int]:
    whole, rest = divmod(size, gpus_per_node)
    return [gpus_per_node] * whole + ([rest] if rest else [])


class Space:
    """Free GPUs that are handed out one gang after the other."""

    def __init__(self, gpus: Iterable[int], gpus_per_node: int) -> None:
        self._free = dict.fromkeys(gpus, 0.0)
        self._gpus_per_node = gpus_per_node
        self._too_large = len(self._free) + 1  # a size that was refused; so is then every larger one

    def __bool__(self) -> bool:
        return bool(self._free)

    def take(self, size: int) -> tuple[int, ...] | None:
        """None: they do not fit."""
        if size >= self._too_large:
            return None
        gpus = pick(size, self._free, self._gpus_per_node)
        if gpus is None:
            self._too_large = size
            return None
        for gpu in gpus:
            del self._free[gpu]
        return gpus


def start_in_order(jobs: Iterable[Active], state: Cluster, blocking: bool = False) -> tuple[Act, ...]:
    """Starts on free GPUs. A job that does not fit is skipped, or with `blocking` holds up all behind it."""
    space, acts = Space(state.free(), state.gpus_per_node), list[Act]()
    for job in jobs:
        if not space:
            break
        if gpus := space.take(job.size):
            acts.append(Start(job.number, gpus))
        elif blocking:
            break
    return tuple(acts)


def rearrange(jobs: Sequence[Active], state: Cluster) -> tuple[Act, ...]:
    """The acts after which the first of `jobs`, waiting and running, that fit together run, each alone on its GPUs.

    Who runs and stays keeps its GPUs, unless those who come would then not fit for the nodes' sake: then all may move.
    """
    empty = Space(range(len(state.tenants)), state.gpus_per_node)
    chosen = _place(jobs, empty)
    kept = {job.number: job.gpus for job in jobs if job.number in chosen and job.gpus}
    held = {gpu for gpus in kept.values() for gpu in gpus}
    comers = sorted((job for job in jobs if job.number in chosen and not job.gpus), key=lambda job: -job.size)
    placed = _place(comers, Space((gpu for gpu in range(len(state.tenants)) if gpu not in held), state.gpus_per_node))
    after = {**kept, **placed} if len(placed) == len(comers) else chosen
    moved = [job for job in jobs if after.get(job.number, ()) != job.gpus]
    preempted: list[Act] = [Preempt(job.number) for job in moved if job.gpus]
    return (*preempted, *(Start(job.number, after[job.number]) for job in moved if job.number in after))


def _place(jobs: Iterable[Active], space: Space) -> dict[int, tuple[int, ...]]:
    """Number → GPUs, of those that fit."""
    placed = {}
    for job in jobs:
        if not space:
            break
        if gpus := space.take(job.size):
            placed[job.number] = gpus
    return placed
