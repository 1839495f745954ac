# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the agents' counters teach: how fast pairs ran, and whose online side missed its promise.

Invariant: a pair is measured only against jobs of its kind that ran alone on the same GPU model, over a whole window in
which nothing else was on the GPU; so what is unknown stays the predictor's matter. A miss counts once per pod and
penalty: a pod that goes on missing lengthens no penalty that is in force. A value, and time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, NamedTuple

from fleet.model import Job, Predictor, Slot
from fleet.weights import BUILTIN
from fleet.weights.penalties import Penalised, Penalties
from fleet.weights.table import MOST_COUNT, Pair, Table

_ROOM: Final = 1 << 60
"""What ran had room"""


class Mean(NamedTuple):
    """A running one, in which what is long ago fades."""

    value: float
    of: int

    def and_(self, value: float) -> Mean:
        """With one more."""
        before = min(self.of, MOST_COUNT - 1)
        return Mean((self.value * before + value) / (before + 1), before + 1)


@dataclass(frozen=True, slots=True)
class Sight:
    """An offline pod that was on one GPU for the whole of a window, as the only offline one."""

    job: Job
    expected: float | None
    """Throughput when it was placed"""
    model: str
    """Of the GPU"""
    online: str | None
    """Kind of the online service on it; None: there was none"""
    launches_per_s: float
    load: float | None
    """Of the online service; None: unknown, as is the gap then"""
    gap_s: float | None

    @property
    def pair(self) -> Pair:
        return Pair(self.online or "", self.job.kind, self.model)


class Miss(NamedTuple):
    """A pod beside an online service that missed its promise."""

    pod: str
    pair: Pair


@dataclass(frozen=True, slots=True)
class Experience:
    """All that was learned. A value."""

    table: Table
    alone: Mapping[tuple[str, str], Mean] = field(default_factory=dict)
    """Kind of job, GPU model → launches per second"""
    penalties: Penalties = field(default_factory=lambda: Penalties({}))
    blamed: Mapping[str, Pair] = field(default_factory=dict)
    """Pods whose miss is in the penalty of their pair that is in force"""

    def measured(self, sights: Iterable[Sight]) -> tuple[Experience, tuple[float, ...]]:
        """After a window; and of each pod that was measured what was expected of it less what it got."""
        seen: Sequence[Sight] = tuple(sights)
        alone, table, errors = dict(self.alone), self.table, []
        for one in seen:
            if one.online is None and one.launches_per_s > 0:
                key = (one.job.kind, one.model)
                before = alone.get(key)
                alone[key] = Mean(one.launches_per_s, 1) if before is None else before.and_(one.launches_per_s)
        for one in seen:
            reference = alone.get((one.job.kind, one.model))
            if one.online is None or reference is None:
                continue
            throughput = min(1.0, one.launches_per_s / reference.value)
            table = table.with_measurement(one.pair, throughput, self._prior(one))
            if one.expected is not None and one.pair not in self.penalties.by_pair:  # else it was halved on purpose
                errors.append(one.expected - throughput)
        return replace(self, alone=alone, table=table), tuple(errors)

    def missed(self, misses: Iterable[Miss], now_s: float) -> Experience:
        """After a window that ended at `now_s`."""
        penalties = self.penalties.current(now_s)
        blamed = {pod: pair for pod, pair in self.blamed.items() if penalties.factor(pair, now_s) < 1.0}
        for pod, pair in misses:
            if pod not in blamed:
                penalties = penalties.missed(pair, now_s)
                blamed[pod] = pair
        return replace(self, penalties=penalties, blamed=blamed)

    def predictor(self, name: str, now_s: float) -> Predictor:
        """The one of this name in BUILTIN, made of the pairs that are known, under penalties."""
        penalties = self.penalties.current(now_s)
        made = BUILTIN[name](self.table)
        return Penalised(made, penalties, now_s) if penalties.by_pair else made

    def _prior(self, one: Sight) -> float | None:
        if one.load is None or one.gap_s is None:
            return None
        slot = Slot("", "", one.model, one.online, one.load, one.gap_s, inf, _ROOM, None)
        found = self.table.prior.weight(slot, replace(one.job, memory_bytes=0))
        return None if found is None else found.throughput
