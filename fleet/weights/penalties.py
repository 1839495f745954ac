# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pairs whose online side missed its promise: worth half for an hour, for twice as long at each further miss.

Invariant: a penalty ends by itself. Why: the node's ladder has evicted the offline job already; this keeps the next
plan from making the same pair at once, without a verdict for ever on what may have been one bad hour. The doubling is
forgotten when the pair has run as long as its last penalty was without a miss. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from fleet.model import Job, Predictor, Slot, Weight, throughput_rows
from fleet.weights.table import Pair

FACTOR: Final = 0.5
FIRST_S: Final = 3600.0
LONGEST_S: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Penalty:
    """Of one pair."""

    until_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of all pairs. A value: `missed` gives another one."""

    by_pair: Mapping[Pair, Penalty] = field(default_factory=lambda: MappingProxyType({}))

    def missed(self, pair: Pair, now_s: float) -> Penalties:
        """After a miss at `now_s`. A miss during a penalty is another one."""
        old = self.by_pair.get(pair)
        remembered = old is not None and now_s < old.until_s + old.length_s
        length_s = min(LONGEST_S, 2 * old.length_s) if old is not None and remembered else FIRST_S
        return Penalties({**self.current(now_s).by_pair, pair: Penalty(now_s + length_s, length_s)})

    def current(self, now_s: float) -> Penalties:
        """Without what is forgotten at `now_s`, so that the map stays as small as the number of bad pairs."""
        kept = {pair: one for pair, one in self.by_pair.items() if now_s < one.until_s + one.length_s}
        return Penalties(kept)

    def factor(self, pair: Pair, now_s: float) -> float:
        """What the pair's weight is multiplied with."""
        found = self.by_pair.get(pair)
        return FACTOR if found is not None and now_s < found.until_s else 1.0


@dataclass(frozen=True, slots=True)
class Penalised:
    """A predictor under penalties, at one moment."""

    predictor: Predictor
    penalties: Penalties
    now_s: float

    @property
    def name(self) -> str:
        return self.predictor.name

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        """The error stays: what is halved is what the pair is worth to us, not what is known of it."""
        found, factor = self.predictor.weight(slot, job), self._factor(slot, job)
        if found is None or factor == 1.0:
            return found
        why = f"{found.why}; halved, as {slot.online} missed its promise beside {job.kind}"
        return replace(found, throughput=found.throughput * factor, why=why)

    def rows(self, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
        """By slot and job."""
        found = throughput_rows(self.predictor, slots, jobs)
        penalised = {(pair.online, pair.model) for pair in self.penalties.by_pair}
        for slot, row in zip(slots, found, strict=True):
            if (slot.online, slot.model) not in penalised:
                yield row
            else:
                yield [
                    None if one is None else one * self._factor(slot, job) for job, one in zip(jobs, row, strict=True)
                ]

    def _factor(self, slot: Slot, job: Job) -> float:
        if slot.online is None:
            return 1.0
        return self.penalties.factor(Pair(slot.online, job.kind, slot.model), self.now_s)
