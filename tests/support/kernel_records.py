# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Histograms as the kernel keeps them, from latencies that a test knows."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from agent.layout import LATENCY_BUCKETS

_WRAP = 1 << 32


def bucket_of(ns: int) -> int:
    """As latency_bucket() in bpf/latency.bpf.h."""
    if ns < 1 << 10:
        return 0
    power = (ns >> 10).bit_length() - 1
    return min(LATENCY_BUCKETS - 1, power << 5 | (ns >> (power + 5)) & 31)


class Recorded:
    """One counter: latencies go in, what the kernel would show comes out."""

    def __init__(self, start: int = 0) -> None:
        self._cells = [start] * LATENCY_BUCKETS

    def add(self, latencies_ns: Iterable[int]) -> None:
        """So many more requests."""
        for ns in latencies_ns:
            bucket = bucket_of(ns)
            self._cells[bucket] = (self._cells[bucket] + 1) % _WRAP

    @property
    def buckets(self) -> bytes:
        """As they lie in the kernel's map."""
        return array("I", self._cells).tobytes()
