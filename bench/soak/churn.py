# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A node on which containers come and go for hours beside a service and two jobs that stay, and an agent that enforces.

It is scraped at each look, as by a Prometheus: what has ended is kept until then. What is looked at is the kernel's
(memory, descriptors, threads, maps), the agent's snapshot, and the difference between what the agent says of those that
stay and the simulated GPU's truth.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Final

import psutil

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError
from agent.core.model import Snapshot
from agent.exporters.api.client import AGENT_SOCK, fetch
from bench.enforcement.agent import write_policy
from tools.harness import agents
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.stage import Cpus, Stage, Workload, open_stage

_MIB: Final = 1 << 20
_OFFLINE: Final = str(BUILD / "bin" / "offline")
_SERVING: Final = ("--rate", "20", "--kernels", "4", "--kernel-us", "500", "--seconds", "864000", "--start-now")
_STAYING: Final = ("--kernels", "10", "--kernel-us", "500", "--host-us", "20000", "--seconds", "0")
_PASSING: Final = ("--kernels", "4", "--kernel-us", "300", "--host-us", "10000", "--seconds", "1")
_SPIN: Final = ("--iterations-per-us", "100")
_ASKED_SECONDS: Final = 10.0
_AT_ONCE: Final = 20
_POLICY: Final = """\
version: 1
enforce: true
online:
  - name: service
    match: {{cgroup: "{path}/online/*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 20ms, window: 10s}}
offline:
  - name: staying
    match: {{cgroup: "{path}/staying/*"}}
  - name: passing
    match: {{cgroup: "{path}/passing/*"}}
"""


@dataclass(slots=True)
class Churn:
    """The node while it runs."""

    stage: Stage[Node]
    agent: psutil.Process
    run_dir: Path
    port: int
    staying: list[Workload]
    passed: int = 0
    failed: int = 0
    _alive: list[Workload] = field(default_factory=list)
    _last: tuple[float, list[float]] | None = None  # the last look's time, and by how many seconds each was off

    def one_comes(self) -> None:
        """A container, unless many that should have ended have not."""
        if len(self._alive) < _AT_ONCE:
            with suppress(SetupError):  # counted as failed when too few have passed at the end
                self._alive.append(self.stage.run("passing", [_OFFLINE, *_PASSING, *_SPIN]))

    def those_that_ended_go(self) -> None:
        """Their containers are removed."""
        ended = [one for one in self._alive if one.process.poll() is not None]
        if ended:
            self.stage.end(ended)
            self.passed += sum(one.process.returncode == 0 for one in ended)
            self.failed += sum(one.process.returncode != 0 for one in ended)
            self._alive = [one for one in self._alive if one not in ended]

    def look(self) -> Mapping[str, float]:
        """What there is now."""
        for one in self.staying:
            one.require_alive()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=_ASKED_SECONDS) as answer:
            series = sum(not line.startswith(b"#") for line in answer)
        snapshot = fetch(self.run_dir / AGENT_SOCK, timeout=_ASKED_SECONDS)
        if snapshot is None:
            raise SetupError("the agent does not answer: see its log")
        guardian = psutil.Process(agents.guardians(self.run_dir)[0])
        error = self._sm_error(snapshot)
        return {
            "agent_rss_mib": self.agent.memory_info().rss / _MIB,
            "agent_fds": self.agent.num_fds(),
            "agent_threads": self.agent.num_threads(),
            "guardian_rss_mib": guardian.memory_info().rss / _MIB,
            "guardian_fds": guardian.num_fds(),
            "maps_mib": agents.maps_bytes(self.agent.pid) / _MIB,
            "run_dir_kib": _size(self.run_dir) / 1024,
            "known_containers": len(snapshot.containers),
            "known_processes": len(snapshot.processes),
            "series": series,
            "lost": sum(snapshot.lost.values()),
            "passed": self.passed,
            **({} if error is None else {"sm_error": error}),
        }

    def _sm_error(self, snapshot: Snapshot) -> float | None:
        """Of those that stay, since the last look: how far their part of the device is from the truth, in the mean."""
        seconds = snapshot.at_ns / NS_PER_SECOND
        reported = {row.container.id: sum(one.totals.sm_seconds for one in row.usage) for row in snapshot.containers}
        true = {line["pid"]: line["sm_ns"] / NS_PER_SECOND for line in self.stage.node.truth()}
        off = [
            reported.get(one.cgroup.rpartition("/")[2], 0.0) - true.get(one.process.pid, 0.0) for one in self.staying
        ]
        before, self._last = self._last, (seconds, off)
        if before is None or seconds <= before[0]:
            return None
        return fmean(abs(now - then) for now, then in zip(off, before[1], strict=True)) / (seconds - before[0])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def looks(folder: Path, seconds: float, containers: int, every_seconds: float) -> Iterator[Mapping[str, float]]:
    """One each so often, while so many containers come and go. SetupError: something that is to stay ended."""
    with ExitStack() as stack:
        node = stack.enter_context(simulated_node(folder / "gpu"))
        stage = stack.enter_context(open_stage(node, folder, Cpus()))
        run_dir = folder / "run"
        write_policy(folder / "policy.yaml", _POLICY.format(path=stage.path))
        where = ["--run-dir", run_dir, "--usage", folder / "usage.sqlite", "--decisions", folder / "decisions.jsonl"]
        port = agents.free_port()
        where += ["--policy", folder / "policy.yaml", "--listen", f"127.0.0.1:{port}"]
        command = agents.command(*where, isolated=True)
        agent = stack.enter_context(agents.running(command, folder / "agent.log", node.environment))
        staying = [stage.start("online", [*_SERVING, *_SPIN])]
        staying += [stage.run("staying", [_OFFLINE, *_STAYING, *_SPIN]) for _ in range(2)]
        churn = Churn(stage, psutil.Process(agent.pid), run_dir, port, staying)
        yield from _pass(churn, seconds, containers, every_seconds)


def _pass(churn: Churn, seconds: float, containers: int, every_seconds: float) -> Iterator[Mapping[str, float]]:
    began, came, next_look = time.monotonic(), 0, 0.0
    while (elapsed := time.monotonic() - began) < seconds:
        while came < containers * elapsed / seconds:
            churn.one_comes()
            came += 1
        churn.those_that_ended_go()
        if elapsed >= next_look:
            yield churn.look()
            next_look += every_seconds
        time.sleep(min(0.05, seconds / containers))
    yield churn.look()
