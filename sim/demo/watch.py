# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Polls the agent while a phase runs: shows gputop, and compares each tick with the simulated GPU's truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from sim.demo.stage import Stage
from tools.harness.wait import poll

_POLL_SECONDS = 0.02
_CONTAINERS = ("chat", "training")


@dataclass(slots=True)
class Watch:
    """Collects over all phases. `pairs` are (attributed, true) SM shares, one per container and tick."""

    stage: Stage
    show: Callable[[Snapshot], None]
    pairs: list[tuple[float, float]] = field(default_factory=list)
    launches: dict[str, int] = field(default_factory=dict)  # container's key → as the agent counted since its start
    members: dict[str, set[int]] = field(default_factory=dict)  # container's key → tgids that were seen in it
    pauses: dict[tuple[str, int], int] = field(default_factory=dict)
    latency_seconds: dict[str, float] = field(default_factory=dict)  # container → its newest one
    _seen_ns: int = 0
    _truth: dict[int, tuple[int, int]] = field(default_factory=dict)  # pid → (when, SM ns)

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        """Watches until `done`, or so many seconds."""

        def over() -> bool:
            if done():
                return True
            self.poll()
            return False

        poll(over, seconds, _POLL_SECONDS)

    def poll(self) -> None:
        """Records the newest snapshot, if there is a new one."""
        snapshot = fetch(self.stage.socket)
        if snapshot is None or snapshot.at_ns == self._seen_ns:
            return
        truth = {row["pid"]: (time.monotonic_ns(), row["sm_ns"]) for row in self.stage.truth()}
        fresh = self._seen_ns and snapshot.at_ns - self._seen_ns < 1.5 * snapshot.interval_ns
        self._seen_ns = snapshot.at_ns
        for row in snapshot.containers:
            if row.container.name in _CONTAINERS and len(row.processes) == 1:
                self._take(snapshot, row.container.name, row.processes[0].tgid, truth, bool(fresh))
        self._truth = truth
        self.show(snapshot)

    def _take(self, snapshot: Snapshot, name: str, tgid: int, truth: dict[int, tuple[int, int]], fresh: bool) -> None:
        row = next(row for row in snapshot.containers if row.container.name == name)
        self.launches[row.container.key] = sum(usage.totals.launches for usage in row.usage)
        self.members.setdefault(row.container.key, set()).add(tgid)
        stance = snapshot.enforcement.get(row.container.key)
        if stance is not None:
            self.pauses[name, tgid] = max(self.pauses.get((name, tgid), 0), stance.pauses_total)
            if stance.latency_seconds is not None:
                self.latency_seconds[name] = stance.latency_seconds
        share = sum(usage.sm_ratio or 0.0 for usage in row.usage)
        if fresh and tgid in truth and tgid in self._truth:
            (now, sm), (then, before) = truth[tgid], self._truth[tgid]
            self.pairs.append((share, (sm - before) / (now - then)))
