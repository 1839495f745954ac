# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One phase of the hostile bench: a fresh agent that enforces, an attacker or none, a service and a job beside it.

The attacker comes first, so that what it fills is full when the service is seen for the first time. What the agent says
is read while all of them run, but for the launches of the service, which are counted when it has ended.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from agent.core.errors import PolicyError, SetupError
from agent.core.model import ContainerUsage, EnforcementStatus, Snapshot
from agent.exporters.api.client import fetch
from bench.enforcement.agent import refusal, write_policy
from bench.enforcement.figures import Phase
from bench.enforcement.pairs import SERVICE
from bench.enforcement.phase import Load, measure
from bench.hostile.attackers import UNDER_A_RULE, USUAL_LADDER, Attacker, attack, burn
from tools.harness import agents, cgroups
from tools.harness.arrivals import poisson
from tools.harness.node import Node, simulated_node
from tools.harness.stage import Cpus, Stage, open_stage
from tools.harness.wait import poll
from tools.harness.workloads import RESNET_LIKE

_RATE_PER_SECOND: Final = 250.0  # half of what the service can serve
_SETTLE_SECONDS: Final = 2.0
_COUNTED_WITHIN_SECONDS: Final = 8.0
_TRIES: Final = 3
_LATE_SECONDS: Final = 0.5  # one more request when all is measured: the service lives until the agent was asked
_TARGET_RATIO: Final = 1.5
# What one claims beside the reserve is what another would be evicted for; contexts are small, so that only claims are.
_DEVICE: Final = {"memory": "4GiB", "context_memory": "64MiB"}
_JOB: Final = (*RESNET_LIKE, "--memory", "256MiB")
_POLICY: Final = """\
version: 1
enforce: {enforce}
online:
  - name: service
    match: {{cgroup: "{path}/online/*"}}
    slo: {{signal: {signal}, quantile: 0.99, target: {target_us}us, window: {window_ms}ms}}
    reserve: 2GiB
offline:
  - name: batch
    match: {{cgroup: "{path}/offline/*"}}
    ladder: [gate, pace, deny, hold, evict]
  - name: tenants
    match: {{cgroup: "{path}/{tenants}/*"}}
    ladder: [{ladder}]
    unprobed: freeze
"""


@dataclass(slots=True)
class Measured:
    """One phase. `refused`: allocations of service and job that were denied or held, and evictions."""

    p99_s: float = 0.0
    offline_sm_ratio: float = 0.0
    stolen_ratio: float = 0.0
    counted: int = 0  # launches of the service
    made: int = 0
    stops_per_second: float = 0.0  # of the job
    refused: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # what the agent says of losses and of the attacker


@dataclass(frozen=True, slots=True)
class Warden:
    """The running agent."""

    folder: Path
    port: int

    def snapshot(self) -> Snapshot:
        """Its newest one. SetupError: it does not answer."""
        snapshot = fetch(self.folder / "agent.sock", timeout=30)
        if snapshot is None:
            raise SetupError(f"the agent does not answer: {(self.folder / 'log').read_text()[-2000:]}")
        return snapshot


@dataclass(slots=True)
class Setting:
    """A node, who is on it, and the requests, which are the same in each phase."""

    stage: Stage[Node]
    programs: Path  # of the attackers
    seconds: float
    port: int  # of the service
    settling: list[float]
    measured: list[float]
    targets_ns: dict[bool, float] = field(default_factory=dict)  # by whether latencies come from HTTP

    def set_target(self, http: bool) -> float:
        """From the service's latency with nothing beside it, as the signal reads it."""
        for _ in range(_TRIES):
            with self._warden(http, enforce=False) as warden:
                phase = self._measure(http, job=False, warden=warden)
            if phase.signal_ns is not None:
                self.targets_ns[http] = _TARGET_RATIO * phase.signal_ns
                return self.targets_ns[http]
        raise SetupError("the signal reads no latency: give more --seconds")

    def phase(self, attacker: Attacker | None, *, http: bool, burning: bool = False) -> Measured:
        """Measures beside the attacker, or beside what only burns as many CPUs as it does."""
        ladder = attacker.ladder if attacker else USUAL_LADDER
        with self._warden(http, enforce=True, ladder=ladder) as warden:
            try:
                if attacker:
                    ports = {"PORT": self.port, "WEB": warden.port}
                    if burning:
                        burn(self.stage, self.programs, attacker)
                    else:
                        attack(self.stage, self.programs, attacker, ports)
                    time.sleep(attacker.head_start_seconds)
                return self._beside(http, warden)
            finally:
                self.stage.end()

    def _beside(self, http: bool, warden: Warden) -> Measured:
        found, path, tgids = Measured(), self.stage.path, list[int]()

        def read() -> None:
            tgids.extend(_members(path, "online"))
            _note(found, warden.snapshot(), path)

        phase = self._measure(http, job=True, warden=warden, read=read)
        found.p99_s, found.offline_sm_ratio = phase.quantile_s(0.99), phase.offline_sm_ratio
        found.stolen_ratio = phase.stolen_ratio or 0.0
        found.made = sum(one["launches"] for one in self.stage.node.truth() if one["pid"] in tgids)

        def all_counted() -> bool:
            found.counted = _launches(warden.snapshot(), path)
            return found.counted >= found.made

        poll(all_counted, _COUNTED_WITHIN_SECONDS, 0.2)
        return found

    def _measure(self, http: bool, *, job: bool, warden: Warden, read: Callable[[], None] = lambda: None) -> Phase:
        def latency_ns() -> float | None:
            read()
            rows = [one for one in warden.snapshot().enforcement.values() if one.role == "online"]
            latency = rows[0].latency_seconds if rows else None
            return None if latency is None else latency * 1e9

        port = self.port if http else None
        load = Load(SERVICE, (_JOB,) if job else (), self.settling, self.measured, port=port, by_http=http)
        return measure(self.stage, load, _SETTLE_SECONDS, self.seconds, latency_ns)

    @contextmanager
    def _warden(self, http: bool, *, enforce: bool, ladder: str = USUAL_LADDER) -> Iterator[Warden]:
        """Bound with all its processes to where all but the service are."""
        folder = self.stage.folder / "agent"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_policy(folder / "policy.yaml", self._policy(http, enforce, ladder))
        if refused := refusal(folder / "policy.yaml"):
            raise PolicyError([refused])
        port = agents.free_port()
        where = ["--run-dir", folder, "--usage", "off", "--listen", f"127.0.0.1:{port}"]
        given = ["--policy", folder / "policy.yaml", "--decisions", folder / "decisions.jsonl"]
        command = agents.command(*where, *given)
        with agents.running(command, folder / "log", self.stage.node.environment) as process:
            for each in (process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))):
                self.stage.cpus.bind(each, online=False)
            yield Warden(folder, port)

    def _policy(self, http: bool, enforce: bool, ladder: str) -> str:
        return _POLICY.format(
            enforce="true" if enforce else "false",
            path=self.stage.path,
            signal=f"http, port: {self.port}" if http else "gpu_wait",
            target_us=max(1, round(self.targets_ns.get(http, 1e9) / 1e3)),
            window_ms=max(1000, round(self.seconds * 1e3)),
            tenants=UNDER_A_RULE,
            ladder=ladder,
        )


@contextmanager
def open_setting(folder: Path, seconds: float) -> Iterator[Setting]:
    """A simulated node with one GPU."""
    cpus = Cpus.split()
    settling = poisson(_RATE_PER_SECOND, _SETTLE_SECONDS, 2)
    measured = [*poisson(_RATE_PER_SECOND, seconds, 1), seconds + _LATE_SECONDS]
    with simulated_node(folder / "gpu", _DEVICE) as node, open_stage(node, folder, cpus) as stage:
        cpus.bind(node.server_tgid, online=True)
        yield Setting(stage, folder / "programs", seconds, agents.free_port(), settling, measured)


def _members(path: str, role: str) -> list[int]:
    """Processes in the cgroups of a role now."""
    folder = cgroups.hierarchy() / path.lstrip("/") / role
    return [int(word) for file in folder.glob("docker/*/cgroup.procs") for word in file.read_text().split()]


def _of(snapshot: Snapshot, path: str, role: str) -> list[ContainerUsage]:
    rows = (*snapshot.containers, *snapshot.ended)
    return [row for row in rows if row.container.cgroup.startswith(f"{path}/{role}/")]


def _launches(snapshot: Snapshot, path: str) -> int:
    return sum(usage.totals.launches for row in _of(snapshot, path, "online") for usage in row.usage)


def _note(found: Measured, snapshot: Snapshot, path: str) -> None:
    """What the agent says while all of them run."""
    by_role = {role: _of(snapshot, path, role) for role in ("online", "offline", "tenants", "strangers")}
    statuses = {
        role: [snapshot.enforcement[row.container.key] for row in rows if row.container.key in snapshot.enforcement]
        for role, rows in by_role.items()
    }
    for job in by_role["offline"]:
        begun = min((process.start_ticks for process in job.processes), default=0)
        lived = time.clock_gettime(time.CLOCK_BOOTTIME) - begun / 100
        stops = sum(one.pauses_total for one in statuses["offline"])
        found.stops_per_second = stops / lived
    for one in (*statuses["online"], *statuses["offline"]):
        found.refused += one.allocations_denied_total + one.allocations_held_total + ("evict" in one.rungs)
    found.seen = _seen(snapshot, by_role, statuses)


def _seen(
    snapshot: Snapshot,
    by_role: Mapping[str, list[ContainerUsage]],
    statuses: Mapping[str, list[EnforcementStatus]],
) -> dict[str, int]:
    """Losses, and what the snapshot says of attackers, by its names there."""
    seen = {name: count for name, count in snapshot.lost.items() if count}
    ours = {row.container.key for role in ("online", "offline") for row in by_role[role]}
    for key in snapshot.container_losses.keys() - ours:  # an attacker that NVML does not list has no row
        for reason, count in snapshot.container_losses[key].items():
            seen[f"of its own:{reason}"] = seen.get(f"of its own:{reason}", 0) + count
    for row in (*by_role["tenants"], *by_role["strangers"]):
        seen["launches"] = seen.get("launches", 0) + sum(usage.totals.launches for usage in row.usage)
        seen["unprobed"] = seen.get("unprobed", 0) + sum(row.unprobed.values())
    for one in statuses["tenants"]:
        seen["foreign resumes"] = seen.get("foreign resumes", 0) + one.foreign_resumes_total
        seen["stops"] = seen.get("stops", 0) + one.pauses_total
        seen["allocations held"] = seen.get("allocations held", 0) + one.allocations_held_total
        seen.update({f"rung {rung}": 1 for rung in one.rungs})
    for one in statuses["online"]:
        seen.update({f"http {name}": count for name, count in one.http.items() if count and not name.startswith("ns:")})
    return {name: count for name, count in seen.items() if count}
