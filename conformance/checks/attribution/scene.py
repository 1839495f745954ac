# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Some tenants in containers of their own, together for a while: what they did, and what was said of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from agent.clock import NS_PER_SECOND
from agent.model import Usage
from bench.attribution_recording import Life, Recording, TruthSample
from bench.attribution_shares import interpolate
from gpu import spin
from gpu.attribution.recorder import Recorder
from gpu.attribution.stage import Cgroups
from gpu.attribution.tenants import Did, Series, Tenant, did
from gpu.here import Here
from gpu.spin import Pace, Workload

_GRID_NS: Final = NS_PER_SECOND // 20
_TRUTH_SECONDS: Final = 0.25  # for the truth on the far side of the last snapshot


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each scene: let everything settle, then measure."""

    warm_up: float
    measured: float


@dataclass(frozen=True, slots=True)
class Stage:
    """What all scenes have in common. `cgroups` None: no containers, and so no agent."""

    here: Here
    recorder: Recorder
    cgroups: Cgroups | None
    pace: Pace
    sm_count: int
    times: Times


@dataclass(frozen=True, slots=True)
class Played:
    """A scene that is over. `usage`: what the agent said of each tenant at the end of the window, by name."""

    name: str
    tenants: Sequence[Tenant]
    done: Mapping[str, Did]
    recording: Recording  # with the truth by the tenants' own count
    usage: Mapping[str, Usage]
    ended_ns: int

    def id_of(self, tenant: str) -> str:
        """Of its container."""
        return next(life.id for life in self.recording.lives if life.name == tenant)


@dataclass(slots=True)
class Cast:
    """Tenants at work, by name."""

    stage: Stage
    working: dict[str, Workload] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)

    def begin(self, tenants: Sequence[Tenant]) -> None:
        """Each in a container of its own. WorkloadError where one does not become ready."""
        here = self.stage.here
        for tenant in tenants:
            name, before = (tenant.name, []) if self.stage.cgroups is None else self.stage.cgroups.container()
            words = tenant.words(self.stage.pace, self.stage.sm_count, here.folder)
            workload = spin.start(here, tenant.name, words, before=before)
            self.working[tenant.name] = workload
            self.lives.append(Life(tenant.name, name, workload.pid, time.monotonic_ns()))
        for workload in self.working.values():
            workload.wait_ready()

    def finish(self, tenants: Sequence[Tenant]) -> dict[str, Did]:
        """What each did. WorkloadError where one ended before."""
        for workload in self.working.values():
            workload.require_alive()
        stage, summaries = self.stage, {}
        for workload in self.working.values():
            workload.process.terminate()
        for name, workload in self.working.items():
            summaries[name] = workload.finish()
        folder = stage.here.folder
        return {t.name: did(t, self.working[t.name], summaries[t.name], stage.pace, folder) for t in tenants}

    def end(self) -> None:
        """Whatever still runs."""
        for workload in self.working.values():
            self.stage.here.end(workload.process)


@contextmanager
def cast(stage: Stage, tenants: Sequence[Tenant]) -> Iterator[Cast]:
    """At work in the block."""
    found = Cast(stage)
    try:
        found.begin(tenants)
        yield found
    finally:
        found.end()


def play(stage: Stage, name: str, tenants: Sequence[Tenant]) -> Played:
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
    done: Mapping[str, Did],
    grown: Mapping[int, Series],
    lives: Sequence[Life],
    span: tuple[int, int],
    ended_ns: int,
) -> Played:
    """Puts together what was recorded. `grown`: SM time by pid, as they say themselves."""
    recorder = stage.recorder
    recording = Recording(
        lives=list(lives),
        snapshots=list(recorder.snapshots.taken),
        truth=on_a_grid(grown, *span),
        listings=recorder.listings(),
        begin_ns=span[0],
        end_ns=span[1],
    )
    return Played(name, tenants, done, recording, usage_of(recording), ended_ns)


def on_a_grid(grown: Mapping[int, Series], begin_ns: int, end_ns: int) -> list[TruthSample]:
    """All series at the same times, on the first device. Between two of its points each one grows evenly."""
    times = [*range(begin_ns, end_ns, _GRID_NS), end_ns]
    series = {pid: one or [(0, 0.0)] for pid, one in grown.items()}
    return [TruthSample(at, {(pid, 0): round(interpolate(one, at)) for pid, one in series.items()}) for at in times]


def usage_of(recording: Recording) -> dict[str, Usage]:
    """What the last snapshot of the window says of each, on the one device that it was seen on."""
    if not recording.measured:
        return {}
    names = {life.id: life.name for life in recording.lives}
    last = recording.measured[-1]
    return {names[row.container.id]: row.usage[0] for row in last.containers if row.container.id in names and row.usage}


def with_truth(one: Played, samples: Sequence[TruthSample]) -> Played:
    """The same, with the truth from elsewhere."""
    return replace(one, recording=replace(one.recording, truth=samples))


def at_the_end(recorder: Recorder, one: Played) -> dict[str, Usage]:
    """The agent's totals of each tenant after it ended, from whichever snapshot told of it last."""
    names = {life.id: life.name for life in one.recording.lives}
    recorder.snapshots.after(one.ended_ns + NS_PER_SECOND // 10)
    return {
        names[row.container.id]: row.usage[0]
        for snapshot in recorder.snapshots.taken
        for row in (*snapshot.ended, *snapshot.containers)
        if row.container.id in names and row.usage
    }
