# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The containers of a phase: cgroups that look like Docker's, and in each a workload that is ready.

The online service and the simulated GPU have a CPU of their own where the machine has two: what an offline workload or
the agent does on a CPU is not to be mistaken for what it does on the GPU.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from agent.core.errors import SetupError
from tools.harness import cgroups
from tools.harness.node import BUILD

PATIENCE_SECONDS = 60.0
_ENTER = 'echo $$ >"$0/cgroup.procs" && exec "$@"'  # the workload itself is in its cgroup from its first instruction


class GpuNode(Protocol):
    """A machine with GPUs, simulated or real."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a program that is to use the GPUs."""
        ...


P = TypeVar("P", bound=GpuNode)
P_co = TypeVar("P_co", bound=GpuNode, covariant=True)


@dataclass(frozen=True, slots=True)
class Cpus:
    """Which CPUs the online side and the rest run on. Empty sets: any."""

    online: frozenset[int] = frozenset()
    rest: frozenset[int] = frozenset()

    @classmethod
    def split(cls, wanted: bool = True) -> Cpus:
        """The first for the online side, the others for the rest; without any binding where there is one only."""
        ours = sorted(os.sched_getaffinity(0))
        return cls(frozenset(ours[:1]), frozenset(ours[1:])) if wanted and len(ours) > 1 else cls()

    def bind(self, process: int, online: bool) -> None:
        """All threads of a process. One that ended meanwhile needs no CPU."""
        for task in Path(f"/proc/{process}/task").iterdir() if self.online else ():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), self.online if online else self.rest)


@dataclass(frozen=True, slots=True)
class Workload:
    """A process in its container."""

    cgroup: str  # its container's path
    process: subprocess.Popen[bytes]
    stderr: Path

    def require_alive(self) -> None:
        """Checks that it still runs. SetupError, with its stderr, when it ended by itself."""
        if self.process.poll() is not None:
            words = self.stderr.read_text(errors="replace").strip()
            raise SetupError(f"a workload ended with {self.process.returncode}: {words or 'its stderr is empty'}")

    def wait(self, seconds: float) -> bool:
        """Waits for its end; whether it came within that time."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)
        return self.process.poll() is not None


@dataclass(slots=True)
class Stage(Generic[P_co]):
    """One node and everything in containers on it."""

    node: P_co
    folder: Path
    cpus: Cpus
    path: str  # of the cgroup around all containers, those of each role in ROLE/ below it; "": programs run as they are
    _running: list[Workload] = field(default_factory=list)

    def start(self, role: str, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> Workload:
        """Starts the workload of sim/ of that name; see `run`."""
        return self.run(role, [str(BUILD / "bin" / role), *arguments], extra)

    def run(self, role: str, program: Sequence[str], extra: Mapping[str, str] | None = None) -> Workload:
        """A program in a container of its own, once it is ready. An online one then waits for `go`."""
        name = uuid.uuid4().hex * 2
        cgroup = f"{self.path}/{role}/docker/{name}" if self.path else ""
        command = [*_entering(cgroup), *program]
        stderr, pipe = self.folder / f"{name[:12]}.err", subprocess.PIPE
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                command,
                env={**os.environ, **self.node.environment, **(extra or {})},
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
            )
        workload = Workload(cgroup, process, stderr)
        self._running.append(workload)
        _until_ready(workload)
        self.cpus.bind(process.pid, role == "online")
        return workload

    def go(self, online: Workload) -> None:
        """Releases an online workload: its first request arrives now."""
        assert online.process.stdin
        online.process.stdin.write(b"g")
        online.process.stdin.flush()

    def end(self, workloads: Sequence[Workload] | None = None) -> None:
        """Kills these, or all, and removes their containers."""
        for workload in list(self._running) if workloads is None else workloads:
            workload.process.kill()
            workload.process.communicate()
            if workload.cgroup:
                cgroups.empty(workload.cgroup)
                cgroups.remove(workload.cgroup, ())
            self._running.remove(workload)


def _entering(cgroup: str) -> list[str]:
    """What a command begins with, so that it runs in this cgroup, which is made."""
    if not cgroup:
        return []
    folder = cgroups.hierarchy() / cgroup.lstrip("/")
    folder.mkdir(parents=True)
    return ["sh", "-c", _ENTER, str(folder)]


@contextmanager
def open_stage(node: P, folder: Path, cpus: Cpus) -> Iterator[Stage[P]]:
    """An empty stage. Everything on it is gone after the block."""
    stage = Stage(node, folder, cpus, f"/gpuwarden-bench-{os.getpid()}")
    with cgroups.own(stage.path):
        try:
            yield stage
        finally:
            stage.end()


def _until_ready(workload: Workload) -> None:
    """Waits for the line `ready`, byte by byte, so that nothing stays in a buffer of ours. SetupError."""
    assert workload.process.stdout
    descriptor, output, deadline = workload.process.stdout.fileno(), b"", time.monotonic() + PATIENCE_SECONDS
    while not output.endswith(b"ready\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(descriptor, 1) if readable else b""
        if not byte:
            words = workload.stderr.read_text(errors="replace").strip()
            raise SetupError(f"a workload did not start: {words or 'its stderr is empty'}")
        output += byte
