# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Live device memory per process, out of the map `memory`."""

from __future__ import annotations

from collections.abc import Iterable

from agent.layout import DEVICE_UNKNOWN, MemoryKey
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import AllocationCount


class Allocations:
    """Reads the sums; the single allocations stay in the kernel."""

    name = "allocations"

    def __init__(self, probes: Probes) -> None:
        self._sums = probes.map("memory")
        self._single = probes.map("allocations")
        self._keys: dict[ProcessId, list[MemoryKey]] = {}

    def collect(self, now_ns: int) -> Iterable[AllocationCount]:
        """One sample per (process, device)."""
        self._keys = {}
        for key, value in self._sums.items():
            process = key.process.id()
            self._keys.setdefault(process, []).append(key)
            ordinal = None if key.device == DEVICE_UNKNOWN else key.device
            yield AllocationCount(process, ordinal, sum(value.live_bytes), value.peak_bytes, value.failures)

    def forget(self, process: ProcessId) -> None:
        """Deletes the process's sums, and the allocations that it did not live to free."""
        live = 0
        for key in self._keys.pop(process, ()):
            sums = self._sums.get(key)
            live += sum(sums.live_bytes) if sums else 0
            self._sums.delete(key)
        if live:
            for key, _ in list(self._single.items()):
                if key.process.id() == process:
                    self._single.delete(key)
