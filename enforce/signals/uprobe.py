# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`uprobe`: how long a function takes, from its call to its return, in all processes of a container.

Of the pseudo-container of the host, only the processes that use a GPU are timed. A reading is one look into a map; a
ProcessFollower keeps the probes in the containers' programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agent.core.model import HOST, ContainerKey, ContainerUsage, Snapshot
from agent.node.procfs import Procfs
from enforce.model import Reading
from enforce.policy.model import Slo, Source, UprobeSource
from enforce.signals.latency_window import Requests, Windows
from enforce.signals.process_follower import ContainerProcesses, FollowerSettings, ProcessFollower
from enforce.signals.uprobe_probe import UprobeProbes


class Uprobe:
    """`load` makes the kernel side, `processes` lists containers' own; both are called on the follower's thread."""

    name = "uprobe"

    def __init__(
        self, load: Callable[[], UprobeProbes], processes: ContainerProcesses, proc: Procfs, requests: Requests
    ) -> None:
        self.follower = ProcessFollower[UprobeSource](FollowerSettings("uprobe"), load, processes, proc)
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._rows: dict[ContainerKey, ContainerUsage] = {}
        self._sources: dict[ContainerKey, UprobeSource] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` calls."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._rows.update((row.container.key, row) for row in snapshot.containers)
        row = self._rows.get(container)
        if row is None or not isinstance(slo.source, UprobeSource):
            return None
        if self._sources.setdefault(container, slo.source) != slo.source:  # another function: other latencies
            self._windows.forget([container])
            self._sources[container] = slo.source
        only = row.processes if container == HOST else None
        number = self.follower.watch(row.container, slo.source, now_ns, only)
        histograms = {number: self.follower.buckets(number)} if number is not None else {}
        return self._windows.read(container, histograms, slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading, where it is more than silence."""
        return self.follower.trouble(container)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone; the follower takes their probes away."""
        gone = list(containers)
        self._windows.forget(gone)
        for container in gone:
            self._rows.pop(container, None)
            self._sources.pop(container, None)
            self.follower.forget(container)

    def failures(self) -> dict[tuple[Source, str], int]:
        """Processes in which the function could not be timed, since the start, by source and reason."""
        return {(source, reason): count for (source, reason), count in list(self.follower.failures.items())}

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost: calls that were not recorded, and rounds that failed. Empty where nothing was watched."""
        if not self.follower.started:
            return {}
        tallies = {f"uprobe:{name}": count for name, count in self.follower.tallies().items()}
        return {**tallies, "uprobe:failed": self.follower.failed_rounds}

    def close(self) -> None:
        """Detaches every probe."""
        self.follower.close()
