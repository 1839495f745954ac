# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel's log-linear latency histogram, and quantiles of the difference of two of them. Pure.

Buckets as in bpf/wait.h: 32 per power of two from 2^10 ns, so a quantile is within 1.6 % of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.layout import LATENCY_BUCKETS, LATENCY_FIRST_POWER, LATENCY_SUB_BITS

Counts = tuple[int, ...]
EMPTY: Counts = (0,) * LATENCY_BUCKETS
_WRAP = 1 << 32


def middle_ns(bucket: int) -> float:
    """The middle of a bucket."""
    power, sub = bucket >> LATENCY_SUB_BITS, bucket & ((1 << LATENCY_SUB_BITS) - 1)
    width = 2.0 ** (power + LATENCY_FIRST_POWER - LATENCY_SUB_BITS)
    return 2.0 ** (power + LATENCY_FIRST_POWER) + (sub + 0.5) * width


def difference(after: Sequence[int], before: Sequence[int]) -> Counts:
    """What was recorded in between; 32-bit counters may have wrapped."""
    return tuple((a - b) % _WRAP for a, b in zip(after, before, strict=True))


def merge(histograms: Sequence[Sequence[int]]) -> Counts:
    """The sum of several."""
    return tuple(map(sum, zip(*histograms, strict=True))) if histograms else EMPTY


def quantile_ns(counts: Sequence[int], quantile: float) -> float | None:
    """The smallest latency that at least `quantile` of the requests did not exceed; None without requests."""
    total = sum(counts)
    if total == 0:
        return None
    wanted, seen = quantile * total, 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return middle_ns(bucket)
    return None
