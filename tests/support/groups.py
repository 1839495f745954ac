# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Real cgroups with real programs in them, in each hierarchy that can freeze; and what the tests look at."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.core.model import Container, ContainerKey, DeviceUuid, ProcessId
from agent.node.cgroups import hierarchies, own_mounts
from agent.node.procfs import Procfs
from enforce.model import Subject
from enforce.policy.model import Limits, Match, OfflineRule
from tools.harness import cgroups

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
WATCHED_SECONDS = 0.3


def roots() -> dict[int, Path]:
    """Version → mount point."""
    return {each.version: Path(each.point) for each in hierarchies(own_mounts()) if each.has_freezer}


def ticks(tgid: int) -> int:
    """CPU time that it used, in 1/100 s."""
    fields = Path(f"/proc/{tgid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def spins(tgid: int) -> bool:
    """Whether it uses the CPU, in a moment that is long enough to tell."""
    before = ticks(tgid)
    time.sleep(WATCHED_SECONDS)
    return ticks(tgid) > before


@dataclass
class Group:
    """A cgroup of a test in one hierarchy, as Docker makes one for a container."""

    version: int
    id: str
    started: list[int] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Below the root."""
        return f"/docker-{self.id}.scope"

    @property
    def folder(self) -> Path:
        return roots()[self.version] / self.path.lstrip("/")

    @property
    def key(self) -> ContainerKey:
        return ContainerKey(f"docker:{self.id}")

    def spinner(self, below: str = "", comm: str = "spinner", deaf: bool = False) -> int:
        """A process in it that uses all the CPU that it gets; `deaf` to SIGTERM."""
        folder = self.folder / below
        folder.mkdir(parents=True, exist_ok=True)
        ready, started = os.pipe()
        tgid = os.fork()
        if tgid == 0:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it ends when the tests are killed
            signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
            Path("/proc/self/comm").write_text(comm)
            os.write(started, b"r")
            while True:
                pass
        self.started.append(tgid)
        os.close(started)
        assert os.read(ready, 1) == b"r"
        os.close(ready)
        (folder / "cgroup.procs").write_text(str(tgid))
        return tgid

    def subject(self, *tgids: int, limits: Limits | None = None) -> Subject:
        """The container as the rungs get it."""
        processes = tuple(Procfs().process_id(tgid) for tgid in tgids)
        limits = limits or Limits(None, 0.05, 10_000_000_000, None)
        rule = OfflineRule("training", Match(), "headroom", None, 1.0, limits, ("gate", "pace", "freeze", "evict"))
        return Subject(
            Container(self.key, "training", "docker", self.id, cgroup=self.path),
            processes,
            frozenset[DeviceUuid](),
            rule,
        )

    def end(self) -> None:
        """Kills, thaws and removes."""
        cgroups.empty(self.path)
        for tgid in self.started:
            with suppress(ProcessLookupError):
                os.kill(tgid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(tgid, 0)
        cgroups.remove(self.path, ())


@contextmanager
def group(version: int) -> Iterator[Group]:
    """Skips where this machine has no such hierarchy, or does not let us make cgroups."""
    if os.geteuid() != 0:
        pytest.skip("making cgroups needs root")
    if version not in roots():
        pytest.skip(f"no freezer of cgroup v{version} is mounted here")
    made = Group(version, secrets.token_hex(32))
    made.folder.mkdir()
    try:
        yield made
    finally:
        made.end()


def process_of(tgid: int) -> ProcessId:
    """With its start time."""
    return Procfs().process_id(tgid)
