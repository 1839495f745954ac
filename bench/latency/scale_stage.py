# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A node with many processes in many containers, the agent beside them, and what that costs the agent.

The agent watches this node's libcuda and no other: whatever else runs on the machine is not in the figures.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.core.errors import SetupError
from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from tools.harness import agents, cgroups
from tools.harness.node import Node, compile_client, simulated_node
from tools.harness.wait import poll

_PATIENCE_SECONDS = 300.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
GPUS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of scale.c does. `hold`: all live at once; `work`: and launch all the time."""

    name: str
    processes: int
    containers: int
    functions: int
    launches: int
    hold: bool
    at_once: int = 8
    work: bool = False

    @property
    def kernels(self) -> int:
        """How many kernels are launched in all."""
        return self.processes * self.functions * self.launches


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the agent, at one moment. `cpu_ratio`: of one core, over the seconds before."""

    lost: dict[str, int]
    series: int
    rss_bytes: int
    maps_bytes: int
    cpu_ratio: float
    collect_seconds: float  # of the last tick


@dataclass(frozen=True, slots=True)
class Stage:
    """A running node with its agent."""

    node: Node
    program: Path
    agent: subprocess.Popen[bytes]
    port: int
    socket: Path
    cgroup: str
    gpus: int = GPUS

    def snapshot(self) -> Snapshot:
        """The agent's newest snapshot."""
        snapshot = fetch(self.socket, timeout=_PATIENCE_SECONDS)
        if snapshot is None:
            raise SetupError("the agent does not answer: see its log")
        return snapshot

    def kernels(self) -> tuple[int, int]:
        """How many the agent has found an owner for in all, and of how many it says that it has not."""
        snapshot = self.snapshot()
        lost = sum(count for name, count in snapshot.lost.items() if name.startswith("launches:"))
        return sum(totals.launches for totals in snapshot.device_totals.values()), lost

    def cost(self, seconds: float = 5.0) -> Cost:
        """Measures the agent's cost over some seconds."""
        before = cpu_seconds(self.agent.pid)
        time.sleep(seconds)  # the time that is measured
        ratio = (cpu_seconds(self.agent.pid) - before) / seconds
        snapshot, process = self.snapshot(), Path(f"/proc/{self.agent.pid}")
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lost = {name: count for name, count in snapshot.lost.items() if count}
        collecting = sum(one.duration_seconds for one in snapshot.collectors)
        return Cost(lost, self._series(), resident, agents.maps_bytes(self.agent.pid), ratio, collecting)

    @contextmanager
    def load(self, load: Load) -> Iterator[None]:
        """Inside, all of its work is done, and those that hold are alive."""
        root = cgroups.hierarchy() / self.cgroup.lstrip("/")
        sizes = (load.containers, self.gpus, load.processes, load.at_once, load.functions, load.launches)
        mode = "work" if load.work else "hold" if load.hold else "end"
        command = [str(self.program), str(root), *map(str, sizes), mode]
        pipe, environment = subprocess.PIPE, {**os.environ, **self.node.environment}
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
            assert process.stdin
            assert process.stdout
            try:
                if process.stdout.readline() != b"worked\n":
                    raise SetupError(f"{load.name}: not every process could do its work")
                yield
            finally:
                process.stdin.close()

    def until_counted(self, kernels: int) -> tuple[int, int]:
        """Waits until `kernels` has accounted for so many, or no more come; returns what it says."""
        poll(lambda: sum(self.kernels()) >= kernels, _PATIENCE_SECONDS / 10, 0.5)
        return self.kernels()

    def until_empty(self) -> bool:
        """Whether the agent's snapshots become empty once all processes are gone."""

        def is_empty() -> bool:
            snapshot = self.snapshot()
            return not snapshot.processes and not snapshot.containers

        return bool(poll(is_empty, _PATIENCE_SECONDS / 4, 0.5))

    def child(self, module: str) -> int:
        """The pid of the agent's child that runs a module. SetupError: there is none."""
        for path in Path(f"/proc/{self.agent.pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return int(pid)
        raise SetupError(f"the agent has no {module}: see its log")

    def memory_bytes(self) -> tuple[int, int]:
        """RSS and PSS of the agent."""
        text = Path(f"/proc/{self.agent.pid}/smaps_rollup").read_text()
        found = dict(re.findall(r"^(Rss|Pss):\s*(\d+) kB$", text, re.MULTILINE))
        return int(found["Rss"]) << 10, int(found["Pss"]) << 10

    def _series(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            return sum(not line.startswith(b"#") for line in answer)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


@contextmanager
def open_stage(folder: Path, gpus: int = GPUS, policy: str | None = None) -> Iterator[Stage]:
    """Builds the program, starts the node and the agent. All of it is gone after the block."""
    program = _compiled(folder)
    cgroup = f"/gpuwarden-scale-{os.getpid()}/docker"
    with (
        cgroups.own(cgroup),
        simulated_node(folder / "gpu", {"gpus": str(gpus)}) as node,
        _agent(node, folder, policy) as (agent, port),
    ):
        yield Stage(node, program, agent, port, folder / "run" / "agent.sock", cgroup, gpus)


def _compiled(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_client(Path(__file__).with_name("scale.c"), folder / "scale", "-O1")


@contextmanager
def _agent(node: Node, folder: Path, policy: str | None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = agents.free_port()
    where = ["--run-dir", folder / "run", "--usage", folder / "usage.sqlite", "--listen", f"127.0.0.1:{port}"]
    if policy is not None:
        (folder / "policy.yaml").write_text(policy)
        (folder / "policy.yaml").chmod(0o600)
        where += ["--policy", folder / "policy.yaml", "--decisions", folder / "decisions"]
    command = agents.command(*where, isolated=True)
    with agents.running(command, folder / "log", node.environment) as agent:
        yield agent, port
