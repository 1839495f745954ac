# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One container's last hour as a bounded list of intervals: fine where it is recent, coarse where it is long ago.

Invariants: recorded time is neither lost nor counted twice by merging; only neighbours of the same kind with no gap
between them are merged; there are never more than `MOST_INTERVALS` × 1.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, Protocol, Self, TypeVar

from agent.core.clock import NS_PER_SECOND

KEPT_NS = 3600 * NS_PER_SECOND
GAP_NS = 15 * NS_PER_SECOND  # without a decision for so long: it was not held meanwhile
MOST_INTERVALS = 40
_FRESH_NS = 5 * NS_PER_SECOND  # added to an interval's age, so that the newest ones may be merged too


class TrackItem(Protocol):
    """An interval of a track."""

    since_ns: int
    until_ns: int

    @property
    def kind(self) -> tuple[object, ...]:
        """Only those of the same kind are merged."""
        ...

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """Extends it by so many seconds, as its latest part says."""
        ...

    def absorb(self, later: Self) -> None:
        """Merges its successor into it."""
        ...


S = TypeVar("S", bound=TrackItem)


@dataclass(slots=True)
class Track(Generic[S]):
    """See the module. `mark`: what the latest part has in common with the next one, if that is to join it."""

    intervals: list[S] = field(default_factory=list)
    mark: object = None
    parts: tuple[str, ...] = ()
    forgotten: int = 0
    totals: tuple[int, float] | None = None  # pauses and paused seconds at the latest part

    def add(self, part: S, mark: object, parts: tuple[str, ...], now_ns: int) -> None:
        """Adds one decision: it is in force from now until the next one, but no longer than GAP_NS."""
        self.extend(now_ns)
        last = self.current(mark, now_ns)
        if last is not None and last.kind == part.kind:
            last.absorb(part)
        else:
            self.intervals.append(part)
        self.mark, self.parts = mark, parts
        if len(self.intervals) > MOST_INTERVALS * 3 // 2:
            self._thin(now_ns)

    def current(self, mark: object, now_ns: int) -> S | None:
        """The latest interval, if it extends until now and its latest part had this mark."""
        return (
            self.intervals[-1]
            if self.intervals and self.intervals[-1].until_ns == now_ns and self.mark == mark
            else None
        )

    def extend(self, now_ns: int) -> None:
        """Extends the latest interval until now, if its decision is recent. Drops intervals that are too old."""
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
        before = sum(one.until_ns - one.since_ns for one in self.intervals)
        self.intervals = thinned(self.intervals, now_ns, MOST_INTERVALS)
        self.forgotten += sum(one.until_ns - one.since_ns for one in self.intervals) < before


def thinned(intervals: list[S], now_ns: int, most: int) -> list[S]:
    """At most so many: neighbours are merged, the shortest and oldest first; what cannot be merged is dropped."""
    while len(intervals) > most:
        costs = sorted(
            ((later.until_ns - one.since_ns) / (max(0, now_ns - later.until_ns) + _FRESH_NS), index)
            for index, (one, later) in enumerate(pairwise(intervals))
            if one.kind == later.kind and one.until_ns == later.since_ns
        )
        if not costs:
            return intervals[len(intervals) - most :]
        gone: set[int] = set()
        for _, index in costs[: len(intervals) - most]:
            if not gone & {index - 1, index, index + 1}:
                intervals[index].absorb(intervals[index + 1])
                gone.add(index + 1)
        intervals = [one for index, one in enumerate(intervals) if index not in gone]
    return intervals
