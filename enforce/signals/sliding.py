# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Counts of the last while, and what they say about an SLO. Pure: time is an argument.

A span is so many slices, however long it is, so that an hour of ten looks a second is no more to keep than ten seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from enforce.model import Reading
from enforce.policy.model import Slo

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
        """These happened since the last look."""
        if not self._kept or now_ns - self._kept[-1].began_ns >= self.span_ns // self.slices:
            self._kept.append(_Slice(now_ns, now_ns, {}))
        last = self._kept[-1]
        last.ended_ns = now_ns
        for bucket, count in counts.items():
            last.counts[bucket] = last.counts.get(bucket, 0) + count
            self.counts[bucket] = self.counts.get(bucket, 0) + count
            self.total += count

    def expire(self, now_ns: int) -> bool:
        """Lets go of what is older than the span; whether anything was."""
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
    """None where both hold too few requests to say anything."""
    enough, enough_recent = window.total >= slo.min_samples, recent.total >= MIN_RECENT_SAMPLES
    if not enough and not enough_recent:
        return None
    low = low_quantile(slo.quantile, recent.total)
    return Reading(
        at_ns=now_ns,
        quantile=slo.quantile,
        latency_ns=quantile_ns(window.counts, slo.quantile) if enough else None,
        samples=window.total,
        recent_ns=quantile_ns(recent.counts, slo.quantile) if enough_recent else None,
        recent_low_ns=quantile_ns(recent.counts, low) if enough_recent else None,
        recent_samples=recent.total,
        recent_span_ns=recent.span_ns,
    )


def low_quantile(quantile: float, samples: int) -> float:
    """The lower end of a quantile's confidence interval, as a quantile of the same samples (binomial, 2 sigma)."""
    return max(0.5, quantile - _DEVIATIONS * math.sqrt(quantile * (1 - quantile) / max(1, samples)))
