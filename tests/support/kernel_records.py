# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Records of the kernel side, made by tests: latency histograms from known latencies, deliveries with few fields."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from agent.collectors.samples import Delivered
from agent.core.model import ProcessId
from agent.probes.abi import LATENCY_BUCKETS

A = ProcessId(10, 1)
_WRAP = 1 << 32


def bucket_of(ns: int) -> int:
    """As latency_bucket() in bpf/latency.bpf.h."""
    if ns < 1 << 10:
        return 0
    power = (ns >> 10).bit_length() - 1
    return min(LATENCY_BUCKETS - 1, power << 5 | (ns >> (power + 5)) & 31)


class Recorded:
    """One latency histogram: latencies go in, the buckets of the kernel's map come out."""

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


def delivery(*functions: tuple[int, int], **values: int) -> Delivered:
    """One of process A; what is not given is 0."""
    fields = dict.fromkeys(
        (
            "at_ns",
            "launches",
            "charged_ns",
            "queued_ns",
            "waited_ns",
            "waited_busy_ns",
            "elapsed_ns",
            "elapsed_busy_ns",
            "pauses",
        ),
        0,
    )
    return Delivered(process=A, functions=functions, **{**fields, **values})
