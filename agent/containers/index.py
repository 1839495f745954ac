# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Process → container, remembered.

A process is looked up once, the first time that it is seen using a GPU: runtimes put it into its cgroup before they
start its program, and reading /proc for every process on every tick would cost more than the whole budget. Bounded:
the one that was asked for longest ago is dropped first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from agent.containers.cgroup import parse_cgroup, told_path
from agent.containers.identity import identify
from agent.errors import GoneError, SetupError
from agent.model import HOST, Container, ProcessId
from agent.procfs import Procfs

_MOST_PROCESSES = 16_384  # 2 KiB each at worst


class ContainerIndex:
    """One per agent. Not thread-safe: it belongs to the observing loop."""

    def __init__(self, procfs: Procfs | None = None, most_processes: int = _MOST_PROCESSES) -> None:
        self._procfs = procfs or Procfs()
        self._most_processes = most_processes
        self._known: OrderedDict[ProcessId, Container] = OrderedDict()
        self._init_path = self._path_of_init()

    def container_of(self, process: ProcessId, told: Sequence[str] = ()) -> Container:
        """Where it belongs; known until forgotten, even after its death.

        `told`: its cgroups' paths as the kernel saw them, for when it ended first. GoneError when it did and there are
        none.
        """
        known = self._known.get(process)
        if known is None:
            known = self._known[process] = self._look_up(process, told)
            if len(self._known) > self._most_processes:
                self._known.popitem(last=False)
        self._known.move_to_end(process)
        return known

    def forget(self, processes: Iterable[ProcessId]) -> None:
        """Drops what is kept about processes that are gone."""
        for process in processes:
            self._known.pop(process, None)

    def __len__(self) -> int:
        return len(self._known)

    def _look_up(self, process: ProcessId, told: Sequence[str]) -> Container:
        try:
            return self._read(process)
        except (GoneError, SetupError):
            if not told:
                raise
            return identify(told_path(told), self._init_path)

    def _read(self, process: ProcessId) -> Container:
        text = self._procfs.cgroup(process.tgid)
        # Asked after reading, so the text cannot be that of a later process under the same pid.
        now = self._procfs.stat(process.tgid)
        container = identify(parse_cgroup(text), self._init_path)
        # The dead may have been moved to the root already: what they did was not the host's doing.
        if now.start_ticks != process.start_ticks or (now.dead and container.key == HOST):
            raise GoneError(f"process {process.tgid} ended before its container was known")
        return container

    def _path_of_init(self) -> str:
        try:
            return parse_cgroup(self._procfs.cgroup(1))
        except GoneError:  # a /proc that hides other users' processes, or a tree of fixtures
            return "/"
