# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpu_wait`: first launch after a drained wait → return of the next wait. Needs nothing from the workload.

Requests of all processes of a container count together. What a request waited for inside the workload, before its first
launch is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent.core.model import ContainerKey, ProcessId, Snapshot
from enforce.model import Reading
from enforce.policy.model import Slo
from enforce.signals.latency_window import Buckets, Requests, Windows

ReadHistogram = Callable[[ProcessId], Buckets | None]


class GpuWait:
    """Quantiles over the SLO's window from the kernel's cumulative histograms, read once per decision."""

    name = "gpu_wait"

    def __init__(self, histogram_of: ReadHistogram, requests: Requests, no_waits: str | None = None) -> None:
        """`no_waits`: why no wait is seen; None: they are."""
        self._histogram_of, self._no_waits = histogram_of, no_waits
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._processes: dict[ContainerKey, tuple[ProcessId, ...]] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._processes = {row.container.key: row.processes for row in snapshot.containers}
        histograms = {process: self._histogram_of(process) for process in self._processes.get(container, ())}
        return self._windows.read(container, histograms, slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading of any container; None: nothing but silence is known."""
        return self._no_waits

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        self._windows.forget(containers)
