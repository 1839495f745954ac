# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A node of three GPUs, the last one split, whose libcuda is its own; and cgroups in which programs come and go.

The agent's libcuda is a copy: other programs on the machine are not counted, and it can be replaced.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.errors import SetupError
from agent.core.model import ContainerUsage, DeviceUuid, Snapshot
from agent.exporters.api.client import fetch
from tests.e2e.node import Agent, Node
from tools.harness import cgroups
from tools.harness import node as bench
from tools.harness.node import BUILD
from tools.harness.wait import until

SETTINGS = {"gpus": "3", "mig": "2:3g.40gb,2g.20gb"}


@dataclass(slots=True)
class Place(Node):
    """Where everything is. `library` is the node's own libcuda."""

    @property
    def library(self) -> Path:
        """What the agent attaches at its start."""
        return self.folder / "lib" / "libcuda.so.1"

    @property
    def environment(self) -> dict[str, str]:
        """For the agent, and for programs outside of containers."""
        return {**os.environ, **self.stage.environment, "LD_LIBRARY_PATH": str(self.library.parent)}


@dataclass(frozen=True, slots=True)
class Hardware:
    """The simulated GPUs, and their UUIDs in order: 0, 1, 2, then the instances of 2."""

    gpus: bench.Node
    uuids: tuple[DeviceUuid, ...]


@contextmanager
def place(folder: Path) -> Iterator[tuple[Place, Hardware]]:
    """The node without an agent."""
    here = Place(folder)
    here.library.parent.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        shutil.copyfile(BUILD / "lib" / name, here.library.parent / name)
    with bench.simulated_node(folder / "gpu", SETTINGS) as gpus:
        yield here, Hardware(gpus, tuple(DeviceUuid(row["uuid"]) for row in gpus.status()))


@dataclass(frozen=True, slots=True)
class Docker:
    """A cgroup as Docker makes one for a container."""

    id: str
    cgroup: Path

    @property
    def key(self) -> str:
        """What the agent calls it."""
        return f"docker:{self.id}"

    @property
    def name(self) -> str:
        """What it is shown as while its name is unknown."""
        return self.id[:12]


@contextmanager
def docker() -> Iterator[Docker]:
    """Gone with the block, at once."""
    root = next(root for root in cgroups.hierarchies() if (root / "cgroup.controllers").exists())
    full_id = secrets.token_hex(32)
    path = f"/docker/{full_id}"
    made = [folder for folder in cgroups.missing(path) if folder.is_relative_to(root)]
    (root / path.lstrip("/")).mkdir(parents=True)
    try:
        yield Docker(full_id, root / path.lstrip("/"))
    finally:
        cgroups.empty(path)
        cgroups.remove(path, made)


def rows_of(snapshot: Snapshot, container: Docker) -> list[ContainerUsage]:
    """The living row or the last figures."""
    return [row for row in (*snapshot.containers, *snapshot.ended) if row.container.key == container.key]


def launches_of(snapshot: Snapshot, container: Docker) -> dict[DeviceUuid, int]:
    """By device, of those on which there were any."""
    usage = [usage for row in rows_of(snapshot, container) for usage in row.usage]
    return {one.device: one.totals.launches for one in usage if one.totals.launches}


@dataclass(slots=True)
class Chronicle:
    """Every snapshot of an agent between `start` and `stop`, by time."""

    agent: Agent
    pages: dict[int, Snapshot] = field(default_factory=dict)
    _ending: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def kept(self) -> Iterator[Chronicle]:
        """Asks more often than the agent ticks."""
        thread = threading.Thread(target=self._keep, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ending.set()
            thread.join()

    def _keep(self) -> None:
        while not self._ending.wait(0.1):
            with suppress(SetupError):  # a stopped agent does not answer
                if (snapshot := fetch(self.agent.socket)) is not None:
                    self.pages[snapshot.at_ns] = snapshot

    def after(self, moment_ns: int) -> Snapshot:
        """The first page that was begun after this moment of the monotonic clock."""
        late = until(lambda: [at for at in sorted(self.pages) if at > moment_ns], "a snapshot that is newer")
        return self.pages[late[0]]
