# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One container's last hour as a bounded list of intervals: fine where it is recent, coarse where it is long ago.

Invariants: time that was told is neither lost nor counted twice by merging; only neighbours of the same kind with no
gap between them are merged; there are never more than `MOST_INTERVALS` × 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from agent.clock import NS_PER_SECOND

KEPT_NS = 3600 * NS_PER_SECOND
GAP_NS = 15 * NS_PER_SECOND  # without a decision for so long: nobody held it meanwhile
MOST_INTERVALS = 64
_FRESH_NS = 5 * NS_PER_SECOND  # added to an interval's age, so that the newest are not all precious


class Stretch(Protocol):
    """What a track is made of."""

    since_ns: int
    until_ns: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Only those of the same kind are merged."""
        ...

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """It lasts for so much longer, in the way that its latest part says."""
        ...

    def absorb(self, later: Self) -> None:
        """Takes in its successor."""
        ...


S = TypeVar("S", bound=Stretch)


@dataclass(slots=True)
class Track(Generic[S]):
    """See the module. `mark`: what the latest part has in common with the next one, if that is to join it."""

    intervals: list[S] = field(default_factory=list)
    mark: object = None
    parts: tuple[str, ...] = ()
    forgotten: int = 0
    totals: tuple[int, float] | None = None  # pauses and paused seconds at the latest part

    def add(self, part: S, mark: object, parts: tuple[str, ...], now_ns: int) -> None:
        """One decision: it is in force from now until the next one, unless that is long in coming."""
        self.reach(now_ns)
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.until_ns == now_ns and self.mark == mark and last.kind == part.kind:
            last.absorb(part)
        else:
            self.intervals.append(part)
        self.mark, self.parts = mark, parts
        if len(self.intervals) > MOST_INTERVALS * 3 // 2:
            self._thin(now_ns)

    def reach(self, now_ns: int) -> None:
        """What was decided last has held until now, if it was decided not long ago. Forgets what is too old."""
        if self.intervals:
            last = self.intervals[-1]
            elapsed = now_ns - last.until_ns
            if 0 < elapsed <= GAP_NS:
                last.hold(elapsed / NS_PER_SECOND, self.parts)
                last.until_ns = now_ns
        if self.intervals and self.intervals[0].until_ns < now_ns - KEPT_NS:
            self.intervals = [one for one in self.intervals if one.until_ns >= now_ns - KEPT_NS]

    def at(self, when_ns: int) -> S | None:
        """The interval that this moment is in."""
        for one in reversed(self.intervals):
            if one.since_ns <= when_ns:
                return one if when_ns <= one.until_ns else None
        return None

    def _thin(self, now_ns: int) -> None:
        while len(self.intervals) > MOST_INTERVALS:
            costs = sorted(
                ((later.until_ns - one.since_ns) / (now_ns - later.until_ns + _FRESH_NS), index)
                for index, (one, later) in enumerate(zip(self.intervals, self.intervals[1:], strict=False))
                if one.kind == later.kind and one.until_ns == later.since_ns
            )
            if not costs:
                del self.intervals[0]
                self.forgotten += 1
                continue
            gone: set[int] = set()
            for _, index in costs[: len(self.intervals) - MOST_INTERVALS]:
                if index not in gone and index + 1 not in gone and index - 1 not in gone:
                    self.intervals[index].absorb(self.intervals[index + 1])
                    gone.add(index + 1)
            self.intervals = [one for index, one in enumerate(self.intervals) if index not in gone]
