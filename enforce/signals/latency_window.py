# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Sliding windows of each container's request latencies, from cumulative histograms, and the readings they give.

Pure: time is an argument. A counter that went down was reset: it then counts from 0, so no window holds less than
nothing. What a counter has when it is first read is not counted, as it is unknown when that happened. Only what changed
costs anything: this is done ten times a second for every online container. A window has a fixed number of slices,
however long it is, so that an hour of ten reads a second takes no more memory than ten seconds.

`Requests` has each online container's requests since the start, and how many of them were slower than the SLO's target.
The quantile of a window cannot be averaged over hours; two sums that only grow can, and an SLO's burn rate is made of
them. The signals add to it, the exporters read it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey
from agent.probes.abi import LATENCY_BUCKETS, quantile_ns, slower
from enforce.model import Reading
from enforce.policy.model import Slo


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests since the container is watched. `slow` may be fractional: the bucket of the target is divided."""

    requests: int
    slow: float
    details: Mapping[str, int] = field(default_factory=dict)  # of the signal's own: "kind:name" → count or ns


class Requests:
    """Requests by container that has a signal. For the deciding thread alone."""

    def __init__(self) -> None:
        self._of: dict[ContainerKey, Counted] = {}

    def add(self, container: ContainerKey, requests: int, slow: float) -> None:
        """Adds new requests. Zero is to be added, too: then it is known that there were none."""
        before = self._of.get(container, Counted(0, 0.0))
        self._of[container] = replace(before, requests=before.requests + requests, slow=before.slow + slow)

    def note(self, container: ContainerKey, details: Mapping[str, int]) -> None:
        """What else the signal saw since the container is watched."""
        self._of[container] = replace(self._of.get(container, Counted(0, 0.0)), details=details)

    def of(self, container: ContainerKey) -> Counted | None:
        """None where nothing could be read yet."""
        return self._of.get(container)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for container in containers:
            self._of.pop(container, None)


K = TypeVar("K", int, float)  # what names a bucket
SLICES = 100  # of a span: it is as sharp as that
MIN_RECENT_SAMPLES = 20
_DEVIATIONS = 2.0


@dataclass(slots=True)
class _Slice(Generic[K]):
    began_ns: int
    ended_ns: int  # when something was added last
    counts: dict[K, int]


@dataclass(slots=True)
class Sliding(Generic[K]):
    """Bucket → count over the last `span_ns`; what is older leaves a slice at a time, never late by more than one."""

    span_ns: int
    slices: int = SLICES
    counts: dict[K, int] = field(default_factory=dict)  # only buckets that have any
    total: int = 0
    _kept: deque[_Slice[K]] = field(default_factory=deque)

    def add(self, now_ns: int, counts: Mapping[K, int]) -> None:
        """Adds what happened since the last call."""
        if not self._kept or now_ns - self._kept[-1].began_ns >= self.span_ns // self.slices:
            self._kept.append(_Slice(now_ns, now_ns, {}))
        last = self._kept[-1]
        last.ended_ns = now_ns
        for bucket, count in counts.items():
            last.counts[bucket] = last.counts.get(bucket, 0) + count
            self.counts[bucket] = self.counts.get(bucket, 0) + count
            self.total += count

    def rate(self, now_ns: int) -> float:
        """Requests per ns since the first one in the span."""
        began_ns = self._kept[0].began_ns if self._kept else now_ns
        return self.total / min(self.span_ns, max(self.span_ns // self.slices, now_ns - began_ns))

    def expire(self, now_ns: int) -> bool:
        """Drops what is older than the span; whether anything was."""
        before = self.total
        while self._kept and self._kept[0].ended_ns <= now_ns - self.span_ns:
            for bucket, count in self._kept.popleft().counts.items():
                self.total -= count
                self.counts[bucket] -= count
                if not self.counts[bucket]:
                    del self.counts[bucket]
        return self.total != before


def reading_of(
    window: Sliding[K],
    recent: Sliding[K],
    slo: Slo,
    now_ns: int,
    quantile_ns: Callable[[Mapping[K, int], float], float | None],
) -> Reading | None:
    """None where both hold too few requests."""
    enough, enough_recent = window.total >= slo.min_samples, recent.total >= MIN_RECENT_SAMPLES
    if not enough and not enough_recent:
        return None
    low = low_quantile(slo.quantile, recent.total)
    judged = recent if enough_recent else window
    most = max(window.rate(now_ns), recent.total / recent.span_ns) * window.span_ns
    certain = certain_quantile(slo.quantile, judged.total, most)
    return Reading(
        at_ns=now_ns,
        quantile=slo.quantile,
        latency_ns=quantile_ns(window.counts, slo.quantile) if enough else None,
        samples=window.total,
        recent_ns=quantile_ns(recent.counts, slo.quantile) if enough_recent else None,
        recent_low_ns=quantile_ns(recent.counts, low) if enough_recent else None,
        recent_samples=recent.total,
        recent_span_ns=recent.span_ns,
        certain_ns=quantile_ns(judged.counts, certain) if certain is not None else None,
        also=reading_of(window, recent, slo.also, now_ns, quantile_ns) if slo.also is not None else None,
    )


def low_quantile(quantile: float, samples: int) -> float:
    """The lower end of a quantile's confidence interval, as a quantile of the same samples (binomial, 2 sigma)."""
    return max(0.0, quantile - _DEVIATIONS * math.sqrt(quantile * (1 - quantile) / max(1, samples)))


def certain_quantile(quantile: float, samples: int, most: float) -> float | None:
    """The quantile of the samples that is that of the `most` requests of a window if all others are faster.

    None: all samples may yet be above it. It is no higher than `low_quantile`, so that noise is not certain.
    """
    certain = 1 - (1 - quantile) * max(1.0, most / samples)
    return min(certain, low_quantile(quantile, samples)) if certain > 0 else None


RECENT_NS = NS_PER_SECOND
_RECENT_SLICES = 20
_MOST_ABSENT = 16  # counters that are not read any more, and may be again
_CELL_BYTES, _CELLS = 4, 32  # of one bucket; buckets that are compared at once
_PART_BYTES = _CELL_BYTES * _CELLS
_WRAP = 1 << 32
CounterKey = TypeVar("CounterKey", bound=Hashable)  # what a counter belongs to: a process, say
Buckets = bytes

"""Cumulative counts as the kernel keeps them: LATENCY_BUCKETS of 32 bits. All of one Window are as long."""

NO_REQUESTS: Buckets = bytes(LATENCY_BUCKETS * _CELL_BYTES)


def grown(after: Buckets, before: Buckets) -> dict[int, int]:
    """What was counted in between, by bucket. 32 bits may have wrapped; if a counter went down, all were reset."""
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
    new: Counter[int] = field(default_factory=Counter)  # what the last call of `take` added
    _seen: OrderedDict[Hashable, Buckets] = field(default_factory=OrderedDict)
    _began: bool = False
    _window: Sliding[int] = field(init=False)
    _recent: Sliding[int] = field(init=False)
    _read: tuple[Slo, Reading | None] | None = None  # good as long as nothing changes

    def __post_init__(self) -> None:
        self._window, self._recent = Sliding(self.span_ns), Sliding(RECENT_NS, _RECENT_SLICES)

    def take(self, histograms: Mapping[CounterKey, Buckets | None], now_ns: int) -> None:
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
        """None while there are too few requests."""
        if self._read is None or self._read[0] is not slo:
            self._read = (slo, reading_of(self._window, self._recent, slo, now_ns, quantile_ns))
        reading = self._read[1]
        return replace(reading, at_ns=now_ns) if reading is not None else None


class Windows:
    """A window for each container that is read, until `forget`. What each read adds goes to `requests`."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._of: dict[ContainerKey, Window] = {}

    def read(
        self, container: ContainerKey, histograms: Mapping[CounterKey, Buckets | None], slo: Slo, now_ns: int
    ) -> Reading | None:
        """Takes the counters as they are now, by what they belong to (a process, say); the container's reading."""
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
