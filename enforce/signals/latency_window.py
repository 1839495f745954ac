# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Each container's requests of the last while, out of the kernel's histograms, which only ever grow.

A counter that went down was set back: what it shows then counts from 0, so no window holds less than nothing. What is
there when one begins to look is not counted, for nobody knows when that was. Only what changed costs anything: this is
done ten times a second for every online container.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agent.clock import NS_PER_SECOND
from agent.layout import LATENCY_BUCKETS
from agent.model import ContainerKey
from enforce.histogram import quantile_ns, slower
from enforce.model import Reading
from enforce.policy.model import Slo
from enforce.signals.requests import Requests
from enforce.signals.sliding import Sliding, reading_of

RECENT_NS = NS_PER_SECOND
_RECENT_SLICES = 20
_MOST_ABSENT = 16  # counters that are not shown any more, and may be again
_CELL_BYTES, _CELLS = 4, 32  # of one bucket; buckets that are compared at once
_PART_BYTES = _CELL_BYTES * _CELLS
_WRAP = 1 << 32

Who = TypeVar("Who", bound=Hashable)  # whose counters: a process, say

Buckets = bytes
"""Cumulative counts as the kernel keeps them: LATENCY_BUCKETS of 32 bits. All of one Window are as long."""

NO_REQUESTS: Buckets = bytes(LATENCY_BUCKETS * _CELL_BYTES)


def grown(after: Buckets, before: Buckets) -> dict[int, int]:
    """What was counted in between, by bucket. 32 bits may have wrapped; if a counter went down, all began anew."""
    found = {}
    for start in range(0, len(after), _PART_BYTES):
        part, old = after[start : start + _PART_BYTES], before[start : start + _PART_BYTES]
        if part == old:
            continue
        cells = zip(memoryview(part).cast("I"), memoryview(old).cast("I"), strict=True)
        for bucket, (now, then) in enumerate(cells, start // _CELL_BYTES):
            if now != then:
                found[bucket] = (now - then) % _WRAP
    if any(count >= _WRAP // 2 for count in found.values()):
        return {bucket: count for bucket, count in enumerate(memoryview(after).cast("I")) if count}
    return found


@dataclass(slots=True)
class Window:
    """The requests of one container, from whatever counts them there: its processes, or a counter of its own."""

    span_ns: int
    new: Counter[int] = field(default_factory=Counter)  # what the last look added
    _seen: OrderedDict[Hashable, Buckets] = field(default_factory=OrderedDict)
    _began: bool = False
    _window: Sliding[int] = field(init=False)
    _recent: Sliding[int] = field(init=False)
    _read: tuple[Slo, Reading | None] | None = None  # good as long as nothing changes

    def __post_init__(self) -> None:
        self._window, self._recent = Sliding(self.span_ns), Sliding(RECENT_NS, _RECENT_SLICES)

    def take(self, histograms: Mapping[Who, Buckets | None], now_ns: int) -> None:
        """The counters as they are now. One that is missing, or None, keeps its part, and goes on where it was."""
        changed, self.new = False, Counter()
        for key, buckets in histograms.items():
            if buckets is None:
                continue
            before = self._seen.get(key, NO_REQUESTS if self._began else buckets)
            self._seen[key] = buckets
            self._seen.move_to_end(key)
            if before != buckets:
                new = grown(buckets, before)
                self._window.add(now_ns, new)
                self._recent.add(now_ns, new)
                self.new.update(new)
                changed = True
        self._began = True
        while len(self._seen) > len(histograms) + _MOST_ABSENT:
            self._seen.popitem(last=False)
        for sliding in (self._window, self._recent):
            changed |= sliding.expire(now_ns)
        if changed:
            self._read = None

    def reading(self, slo: Slo, now_ns: int) -> Reading | None:
        """None while there are too few requests to say anything."""
        if self._read is None or self._read[0] is not slo:
            self._read = (slo, reading_of(self._window, self._recent, slo, now_ns, quantile_ns))
        reading = self._read[1]
        return replace(reading, at_ns=now_ns) if reading is not None else None


class Windows:
    """One for each container that is asked about, until it is gone. `requests` is told what each look added."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._of: dict[ContainerKey, Window] = {}

    def read(
        self, container: ContainerKey, histograms: Mapping[Who, Buckets | None], slo: Slo, now_ns: int
    ) -> Reading | None:
        """Takes the counters as they are now, by whose they are (a process, say), and says what they come to."""
        window = self._of.get(container)
        if window is None or window.span_ns != slo.window_ns:
            window = self._of[container] = Window(slo.window_ns)
        window.take(histograms, now_ns)
        if any(buckets is not None for buckets in histograms.values()):
            self._requests.add(container, sum(window.new.values()), slower(window.new, slo.target_ns))
        return window.reading(slo, now_ns)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for container in containers:
            self._of.pop(container, None)
