# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Clusters and tables for the fleet's benches: drawn from a seed by stated rules, or from a co-location table.

- `kinds`: 20 online kinds on 2 GPU models beside 40 programs, each pair's throughput drawn as
  exp(−(a_i·b_j + c_i·d_j + .05·noise)): two resources that both press on, .35–1 of alone for most. Types are exact.
- `loads`: the same services, each GPU with a load, gaps, slack and free memory of its own, and the prior as weights: no
  two slots are alike.
- a table from a file: its jobs as online services and as programs, on its GPU models; what did not run is no pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from typing import Final

from fleet.model import FleetError, Job, Predictor, Slot, Weight
from fleet.weights.physical import Physical
from fleet.weights.table import Pair, parse_colocation

_GIB: Final = 1 << 30
_ONLINE, _OFFLINE, _MODELS = 20, 40, ("A", "B")


@dataclass(frozen=True, slots=True)
class Only:
    """A table as the whole truth: what it lacks is no pair."""

    pairs: Mapping[Pair, float]
    name: str = "only measured pairs"

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        found = self.pairs.get(Pair(slot.online or "", job.kind, slot.model))
        return None if found is None else Weight(found, 0.0, "measured")

    def rows(self, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
        for slot in slots:
            yield [self.pairs.get(Pair(slot.online or "", job.kind, slot.model)) for job in jobs]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a plan is made for."""

    slots: tuple[Slot, ...]
    jobs: tuple[Job, ...]
    predictor: Predictor


def read(path: Path) -> dict[Pair, float]:
    """The pairs of a co-location table, of jobs on one GPU where the names tell, each GPU model once."""
    try:
        text = path.read_text()
    except OSError as error:
        raise FleetError(f"{path} cannot be read: {error.strerror}") from error
    found = {pair: one.throughput for pair, one in parse_colocation(text).table.pairs.items()}
    by_model: dict[str, dict[tuple[str, str], float]] = {}
    for pair, throughput in sorted(found.items()):
        by_model.setdefault(pair.model, {})[pair.online, pair.offline] = throughput
    kept: list[str] = []
    for model, pairs in by_model.items():  # a model whose figures are another one's is no second measurement
        if all(pairs != by_model[other] for other in kept):
            kept.append(model)
    return {pair: throughput for pair, throughput in found.items() if pair.model in kept}


def drawn_table(seed: int) -> dict[Pair, float]:
    """Of `kinds`."""
    draw = Random(seed)
    pressed = [(draw.uniform(0.1, 0.9), draw.uniform(0.0, 0.6)) for _ in range(_OFFLINE)]
    found = {}
    for model in _MODELS:
        for online in range(_ONLINE):
            pressing = draw.uniform(0.1, 0.9), draw.uniform(0.0, 0.9)
            for offline, (one, other) in enumerate(pressed):
                loss = pressing[0] * one + pressing[1] * other + 0.05 * abs(draw.gauss(0, 1))
                found[Pair(f"service-{online}", f"program-{offline}", model)] = exp(-loss)
    return found


def of_table(pairs: Mapping[Pair, float], count: int, seed: int) -> Cluster:
    """`count` slots and jobs, uniform over what the table has."""
    draw = Random(seed)
    places = sorted({(pair.online, pair.model) for pair in pairs})
    kinds = sorted({pair.offline for pair in pairs})
    slots = []
    for at in range(count):
        online, model = draw.choice(places)
        slots.append(Slot(f"node-{at // 8}", f"GPU-{at}", model, online, 0.5, 0.01, 0.01, 80 * _GIB, None))
    jobs = tuple(Job(f"job-{at}", draw.choice(kinds), 8 * _GIB, 1e-3) for at in range(count))
    return Cluster(tuple(slots), jobs, Only(dict(pairs)))


def of_loads(count: int, seed: int) -> Cluster:
    """No two slots alike."""
    draw = Random(seed)
    services = [(draw.uniform(0.1, 0.8), 10 ** draw.uniform(-2.7, -1.3)) for _ in range(_ONLINE)]
    programs = [(draw.choice([4, 8, 16, 24, 40]), 10 ** draw.uniform(-4, -2)) for _ in range(_OFFLINE)]
    slots = []
    for at in range(count):
        kind = draw.randrange(_ONLINE)
        load, gap_s = services[kind]
        load = min(0.99, max(0.01, load + draw.uniform(-0.1, 0.1)))
        gap_s *= draw.uniform(0.8, 1.25)
        slots.append(
            Slot(
                node=f"node-{at // 8}",
                gpu=f"GPU-{at}",
                model=draw.choice(_MODELS),
                online=f"service-{kind}",
                load=load,
                gap_s=gap_s,
                slack_s=gap_s * draw.uniform(0.5, 1.5),
                free_bytes=draw.randrange(10 * _GIB, 80 * _GIB),
                spatial=None,
            )
        )
    jobs = []
    for at in range(count):
        kind = draw.randrange(_OFFLINE)
        gib, kernel_s = programs[kind]
        jobs.append(Job(f"job-{at}", f"program-{kind}", gib * _GIB, kernel_s))
    return Cluster(tuple(slots), tuple(jobs), Physical())
