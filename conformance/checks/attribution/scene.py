# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Some tenants in containers of their own, together for a while: what they did, and what the agent reported of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import Usage
from bench.attribution.recording import Life, Recording, TruthSample
from bench.attribution.shares import interpolate
from conformance.checks.attribution.recorder import Recorder
from conformance.checks.attribution.stage import Cgroups
from conformance.checks.attribution.tenants import Series, Tenant, TenantWork, did
from conformance.clients import workload as spin_workload
from conformance.clients.workload import Pace, Workload
from conformance.host import Host

_GRID_NS: Final = NS_PER_SECOND // 20
_TRUTH_SECONDS: Final = 0.25  # for the truth on the far side of the last snapshot


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each scene: let everything settle, then measure."""

    warm_up: float
    measured: float


@dataclass(frozen=True, slots=True)
class Stage:
    """What all scenes have in common. `cgroups` None: no containers, and so no agent. `extra`: of their environment."""

    host: Host
    recorder: Recorder
    cgroups: Cgroups | None
    pace: Pace
    sm_count: int
    times: Times
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SceneResult:
    """A scene that is over. `usage`: what the agent reported of each tenant at the end of the window, by name."""

    name: str
    tenants: Sequence[Tenant]
    done: Mapping[str, TenantWork]
    recording: Recording  # with the truth by the tenants' own count
    usage: Mapping[str, Usage]
    ended_ns: int

    def id_of(self, tenant: str) -> str:
        """Id of a tenant's container."""
        return next(life.id for life in self.recording.lives if life.name == tenant)


@dataclass(slots=True)
class RunningTenants:
    """Tenants at work, by name."""

    stage: Stage
    working: dict[str, Workload] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)

    def begin(self, tenants: Sequence[Tenant]) -> None:
        """Each in a container of its own. WorkloadError where one does not become ready."""
        host = self.stage.host
        for tenant in tenants:
            name, before = (tenant.name, []) if self.stage.cgroups is None else self.stage.cgroups.container()
            words = tenant.words(self.stage.pace, self.stage.sm_count, host.folder)
            workload = spin_workload.start(host, tenant.name, words, self.stage.extra, before)
            self.working[tenant.name] = workload
            self.lives.append(Life(tenant.name, name, workload.pid, time.monotonic_ns()))
        for workload in self.working.values():
            workload.wait_ready()

    def finish(self, tenants: Sequence[Tenant]) -> dict[str, TenantWork]:
        """Ends the tenants; the work of each. WorkloadError where one ended before."""
        for workload in self.working.values():
            workload.require_alive()
        stage, summaries = self.stage, {}
        for workload in self.working.values():
            workload.process.terminate()
        for name, workload in self.working.items():
            summaries[name] = workload.finish()
        folder = stage.host.folder
        return {t.name: did(t, self.working[t.name], summaries[t.name], stage.pace, folder) for t in tenants}

    def end(self) -> None:
        """Ends whatever still runs."""
        for workload in self.working.values():
            self.stage.host.end(workload.process)


@contextmanager
def cast(stage: Stage, tenants: Sequence[Tenant]) -> Iterator[RunningTenants]:
    """Tenants at work, for the length of the block."""
    found = RunningTenants(stage)
    try:
        found.begin(tenants)
        yield found
    finally:
        found.end()


def play(stage: Stage, name: str, tenants: Sequence[Tenant]) -> SceneResult:
    """Raises WorkloadError or RuntimeError."""
    with cast(stage, tenants) as players:
        begin_ns, end_ns = window(stage)
        done = players.finish(tenants)
        ended_ns = time.monotonic_ns()
    grown = {players.working[tenant.name].pid: done[tenant.name].sm for tenant in tenants}
    return played(stage, name, tenants, done, grown, players.lives, (begin_ns, end_ns), ended_ns)


def window(stage: Stage) -> tuple[int, int]:
    """Lets the tenants settle, then watches; the times of the snapshots between which is measured."""
    snapshots = stage.recorder.snapshots
    time.sleep(stage.times.warm_up)
    begin = snapshots.after(time.monotonic_ns())
    time.sleep(stage.times.measured)
    end = snapshots.after(begin.at_ns + round((stage.times.measured - 0.5) * NS_PER_SECOND))
    time.sleep(_TRUTH_SECONDS)
    return begin.at_ns, end.at_ns


def played(
    stage: Stage,
    name: str,
    tenants: Sequence[Tenant],
    done: Mapping[str, TenantWork],
    grown: Mapping[int, Series],
    lives: Sequence[Life],
    span: tuple[int, int],
    ended_ns: int,
) -> SceneResult:
    """Puts together what was recorded. `grown`: SM time by pid, as they say themselves."""
    recorder = stage.recorder
    recording = Recording(
        lives=list(lives),
        snapshots=list(recorder.snapshots.taken),
        truth=on_a_grid(grown, *span, _first_device(recorder)),
        listings=recorder.listings(),
        begin_ns=span[0],
        end_ns=span[1],
    )
    return SceneResult(name, tenants, done, recording, usage_of(recording), ended_ns)


def _first_device(recorder: Recorder) -> str:
    """The UUID of the one that scenes are played on; "" where the agent did not tell."""
    readings = (reading for snapshot in recorder.snapshots.taken for reading in snapshot.devices)
    return next((reading.device.uuid for reading in readings if reading.device.index == 0), "")


def on_a_grid(grown: Mapping[int, Series], begin_ns: int, end_ns: int, device: str) -> list[TruthSample]:
    """All series at the same times, on that device. Between two of its points each one grows evenly."""
    times = [*range(begin_ns, end_ns, _GRID_NS), end_ns]
    series = {pid: one or [(0, 0.0)] for pid, one in grown.items()}
    return [
        TruthSample(at, {(pid, device): round(interpolate(one, at)) for pid, one in series.items()}) for at in times
    ]


def usage_of(recording: Recording) -> dict[str, Usage]:
    """What the last snapshot of the window says of each, on the one device that it was seen on."""
    if not recording.measured:
        return {}
    names = {life.id: life.name for life in recording.lives}
    last = recording.measured[-1]
    return {names[row.container.id]: row.usage[0] for row in last.containers if row.container.id in names and row.usage}


def with_truth(one: SceneResult, samples: Sequence[TruthSample]) -> SceneResult:
    """The result, with the truth from another source."""
    return replace(one, recording=replace(one.recording, truth=samples))


def at_the_end(recorder: Recorder, one: SceneResult) -> dict[str, Usage]:
    """The agent's totals of each tenant after it ended, from the last snapshot that has it."""
    names = {life.id: life.name for life in one.recording.lives}
    recorder.snapshots.after(one.ended_ns + NS_PER_SECOND // 10)
    return {
        names[row.container.id]: row.usage[0]
        for snapshot in recorder.snapshots.taken
        for row in (*snapshot.ended, *snapshot.containers)
        if row.container.id in names and row.usage
    }
