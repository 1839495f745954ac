# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel's log-linear latency histogram, and its quantiles. Pure.

Buckets as in bpf/wait.h: 32 per power of two from 2^10 ns, so a quantile is within 1.6 % of the true one. What is
faster than a microsecond is in the first bucket, what takes longer than 18 minutes in the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from agent.probes.abi import LATENCY_FIRST_POWER, LATENCY_SUB_BITS

_ROUNDING = 1e-9  # 0.07 × 100 is a little more than 7


def middle_ns(bucket: int) -> float:
    """The middle of a bucket, in ns."""
    power, sub = bucket >> LATENCY_SUB_BITS, bucket & ((1 << LATENCY_SUB_BITS) - 1)
    width = 2.0 ** (power + LATENCY_FIRST_POWER - LATENCY_SUB_BITS)
    return 2.0 ** (power + LATENCY_FIRST_POWER) + (sub + 0.5) * width


def quantile_ns(counts: Mapping[int, int], quantile: float) -> float | None:
    """The smallest latency that at least `quantile` of the requests did not exceed; None without requests.

    `counts`: bucket → requests.
    """
    wanted, seen = max(1, math.ceil(quantile * sum(counts.values()) - _ROUNDING)), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= wanted:
            return middle_ns(bucket)
    return None


def slower(counts: Mapping[int, int], target_ns: int) -> int:
    """Requests that took longer than the target: more than 1 − quantile of all just where `quantile_ns` exceeds it."""
    return sum(count for bucket, count in counts.items() if middle_ns(bucket) > target_ns)
