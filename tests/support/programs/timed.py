# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs whose calls of one function are known (timed.c), and the signal that times them."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from agent.core.clock import monotonic_ns
from agent.core.model import Container, ContainerKey, ContainerUsage, ProcessId, Snapshot
from agent.node import preflight
from agent.node.procfs import Procfs
from enforce.model import Reading
from enforce.policy.model import Slo, UprobeSource
from enforce.signals.latency_window import Requests
from enforce.signals.process_follower import ProcessFollower
from enforce.signals.uprobe import Uprobe, UprobeProbes
from tools.harness.wait import until

_WITHIN_SECONDS = 60.0
MINUTE_NS = 60_000_000_000
OBJECT = preflight.bpf_object().with_name("uprobe.bpf.o")

Took = tuple[int, int]
"""A call's least and most possible duration in ns: measured within it, and around it."""


def follows(follower: ProcessFollower[Any], process: ProcessId) -> bool:
    """Whether the process counts now."""
    probes = follower._kernel.probes
    return probes is not None and process.tgid in probes.followed()


def snapshot_of(processes: Mapping[ContainerKey, Collection[ProcessId]]) -> Snapshot:
    """A picture of containers with these processes, and nothing else."""
    rows = (ContainerUsage(Container(key, str(key), "runc"), (), tuple(found)) for key, found in processes.items())
    return Snapshot(at_ns=monotonic_ns(), wall_ns=0, interval_ns=0, devices=(), containers=tuple(rows))


def compile_timed(folder: Path, *options: str) -> Path:
    """timed.c."""
    source = Path(__file__).parent / "timed.c"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", *options]
    subprocess.run(["gcc", *flags, str(source), "-o", str(folder / "timed"), "-lpthread"], check=True)
    return folder / "timed"


@dataclass(slots=True)
class Timed:
    """One program that is ready."""

    process: ProcessId
    stdin: IO[str]
    stdout: IO[str]

    def do(self, name: str, times: int, us: int, depth: int = 0) -> list[Took]:
        """What each call took."""
        self.stdin.write(f"{name} {times} {us} {depth}\n")
        self.stdin.flush()
        took = []
        while (line := self.stdout.readline()) not in ("done\n", ""):
            within, around = line.split()
            took.append((int(within), int(around)))
        assert line == "done\n", "the program died"
        return took


@contextmanager
def start(program: Path) -> Iterator[Timed]:
    """One, until the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield Timed(Procfs().process_id(process.pid), process.stdin, process.stdout)
            process.stdin.close()
            assert process.wait(timeout=_WITHIN_SECONDS) == 0
        finally:
            process.kill()


@dataclass(slots=True)
class Timing:
    """The signal, over containers that a test makes up out of processes."""

    slo: Slo
    members: dict[ContainerKey, set[ProcessId]] = field(default_factory=dict)
    signal: Uprobe = field(init=False)

    def __post_init__(self) -> None:
        self.signal = Uprobe(lambda: UprobeProbes(OBJECT, Procfs()), self, Procfs(), Requests())

    def of(self, container: Container) -> set[int]:
        """Plays the container's cgroup."""
        return {process.tgid for process in self.members.get(container.key, ()) if Procfs().is_alive(process)}

    def forget(self, container: ContainerKey) -> None:
        """Plays it too."""

    def read(self, container: ContainerKey, slo: Slo | None = None) -> Reading | None:
        """As the loop does."""
        return self.signal.read(snapshot_of(self.members), container, slo or self.slo, monotonic_ns())

    def follow(self, container: ContainerKey, process: ProcessId) -> None:
        """The process is in the container; returns when its calls count."""
        self.members.setdefault(container, set()).add(process)
        self.read(container)
        self.signal.follower.wake()
        until(lambda: follows(self.signal.follower, process), f"the probe on {process}")
        self.read(container)

    def samples(self, container: ContainerKey) -> int:
        """Calls in the window."""
        reading = self.read(container)
        return reading.samples if reading else 0


@contextmanager
def timing(source: UprobeSource, window_ns: int = MINUTE_NS, min_samples: int = 1) -> Iterator[Timing]:
    """Takes every probe away at the end."""
    made = Timing(Slo("uprobe", 0.5, 50_000_000, window_ns, min_samples, source))
    try:
        yield made
    finally:
        made.signal.close()
