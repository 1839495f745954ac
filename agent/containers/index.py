# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Process → container (ContainerIndex), and container → all of its processes (Residents).

A process is looked up once, the first time that it is seen using a GPU: runtimes put it into its cgroup before they
start its program, and reading /proc for every process on every tick would cost more than the whole budget. Bounded:
the least recently used one is dropped first.

A container's processes, those that use no GPU included, are those of its cgroup and of the ones below. One of these may
be another container's (Docker in Docker), so the container of each process is looked up, once.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from agent.containers.identity import identify, parse_cgroup, reported_path
from agent.core.errors import GoneError, SetupError
from agent.core.model import HOST, Container, ContainerKey, ProcessId
from agent.node.cgroups import hierarchies, parse_mounts
from agent.node.procfs import Procfs

_MOST_PROCESSES = 16_384  # 2 KiB each at worst


class ContainerIndex:
    """One per agent. Not thread-safe: it belongs to the observing loop."""

    def __init__(self, procfs: Procfs | None = None, most_processes: int = _MOST_PROCESSES) -> None:
        self._procfs = procfs or Procfs()
        self._most_processes = most_processes
        self._known: OrderedDict[ProcessId, Container] = OrderedDict()
        self._init_path = self._path_of_init()

    def container_of(self, process: ProcessId, cgroup_paths: Sequence[str] = ()) -> Container:
        """The container of a process; known until forgotten, even after the process ended.

        `cgroup_paths`: as the probes reported them, for a process that ended before it was looked up. GoneError when it
        did and there are none.
        """
        known = self._known.get(process)
        if known is None:
            known = self._known[process] = self._look_up(process, cgroup_paths)
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

    def _look_up(self, process: ProcessId, cgroup_paths: Sequence[str]) -> Container:
        try:
            return self._read(process)
        except (GoneError, SetupError):
            if not cgroup_paths:
                raise
            return identify(reported_path(cgroup_paths), self._init_path)

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


_MOST_FOLDERS = 1024  # a container that may make cgroups may make any number


class Residents:
    """The processes of containers. Not thread-safe: it belongs to one thread, as does its index."""

    def __init__(self, proc: Procfs) -> None:
        self._proc, self._index = proc, ContainerIndex(proc)
        self._known: dict[ContainerKey, dict[int, bool]] = {}

    def of(self, container: Container) -> set[int]:
        """The tgids now. Empty where its cgroup cannot be seen."""
        before = self._known.get(container.key, {})
        now = {
            tgid: before[tgid] if tgid in before else self._belongs(tgid, container.key)
            for tgid in self._listed(container.cgroup)
        }
        self._known[container.key] = now
        return {tgid for tgid, belongs in now.items() if belongs}

    def forget(self, container: ContainerKey) -> None:
        """Drops what is kept about a container."""
        self._known.pop(container, None)

    def _belongs(self, tgid: int, key: ContainerKey) -> bool:
        try:
            return self._index.container_of(self._proc.process_id(tgid)).key == key
        except (GoneError, SetupError):
            return False

    def _listed(self, path: str) -> set[int]:
        """The tgids in that cgroup and below, in the first hierarchy that has any."""
        for hierarchy in hierarchies(parse_mounts(self._proc.mounts(os.getpid()))):
            if found := set(_members(Path(hierarchy.point) / path.lstrip("/"))):
                return found
        return set()


def _members(folder: Path) -> Iterator[int]:
    for here in _folders(folder):
        try:
            text = Path(here, "cgroup.procs").read_text()
        except OSError:  # removed meanwhile, or threaded: then its domain lists its processes
            continue
        yield from (int(word) for word in text.split() if word != "0")


def _folders(top: Path) -> Iterator[str]:
    """A directory and those below, breadth first, _MOST_FOLDERS at most; no directory is listed further than that."""
    waiting, left = deque([str(top)]), _MOST_FOLDERS - 1
    while waiting:
        here = waiting.popleft()
        yield here
        if not left:
            continue
        with suppress(OSError), os.scandir(here) as entries:
            found = list(islice((one.path for one in entries if one.is_dir(follow_symlinks=False)), left))
            left -= len(found)
            waiting.extend(found)
