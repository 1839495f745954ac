# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Deliveries: what was launched between two drained waits and how long that took, out of the map `delivered`.

The kernel keeps the last 16 per process; of a process that waits more often than that between two reads, the rest is
not seen, which a sample may miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.layout import DELIVERIES, ProcessKey
from agent.layout import Deliveries as Ring
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import Delivered


class Deliveries:
    """Hands over each delivery once."""

    name = "deliveries"

    def __init__(self, probes: Probes) -> None:
        self._map = probes.map("delivered")
        self._latencies = probes.map("latencies")
        self._seen: dict[ProcessId, int] = {}

    def collect(self, now_ns: int) -> Iterable[Delivered]:
        """The deliveries since the previous call, at most 16 per process."""
        before, self._seen = self._seen, {}  # whoever left the map is forgotten with it
        for key, ring in self._map.items():
            process = key.id()
            self._seen[process] = ring.count
            yield from fresh(process, ring, before.get(process, 0))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their rings and latency histograms."""
        for process in processes:
            self._seen.pop(process, None)
            self._map.delete(ProcessKey.of(process))
            self._latencies.delete(ProcessKey.of(process))


def fresh(process: ProcessId, ring: Ring, seen: int) -> Iterable[Delivered]:
    """Those entries of a ring that came after the first `seen`."""
    for number in range(max(seen, ring.count - DELIVERIES), ring.count):
        entry = ring.ring[number % DELIVERIES]
        yield Delivered(
            process,
            entry.at_ns,
            entry.launches,
            entry.charged_ns,
            entry.queued_ns,
            entry.waited_ns,
            entry.waited_busy_ns,
            entry.elapsed_ns,
            entry.elapsed_busy_ns,
            entry.pauses,
            tuple((one.function, one.launches) for one in entry.functions if one.launches),
        )
