# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Process → container (ContainerIndex), and container → all of its processes (Residents).

A process is looked up once, the first time that it is seen using a GPU: runtimes put it into its cgroup before they
start its program, and reading /proc for every process on every tick would cost more than the whole budget. Bounded:
the least recently used one is dropped first.

Who may have made the cgroup is asked of its directories' owners, and one id is one cgroup's (Claims).

A container's processes, those that use no GPU included, are those of its cgroup and of the ones below. One of these may
be another container's (below a cgroup that no runtime made), so the container of each is looked up, once.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from agent.containers.identity import identify, is_hash, parse_cgroup, refused, reported_path
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, SetupError
from agent.core.model import HOST, Container, ContainerKey, ProcessId
from agent.core.text import printable
from agent.node.cgroups import CgroupTree, folders, hierarchies, parse_mounts
from agent.node.procfs import Procfs

_log = logging.getLogger(__name__)
_MOST_PROCESSES = 16_384  # 2 KiB each at worst
_MOST_IDS = 16_384
_MOST_OWNERS = 1024
_OWNER_NS = NS_PER_SECOND
_MOST_LOGGED = 1024


def cgroup_tree(proc: Procfs) -> CgroupTree:
    """The hierarchies that this process sees, as they are mounted now."""
    try:
        mounts = parse_mounts(proc.mounts(os.getpid()))
    except (GoneError, SetupError):  # a /proc of another machine
        mounts = []
    return CgroupTree(tuple(hierarchy.point for hierarchy in hierarchies(mounts)))


def path_of_init(proc: Procfs) -> str:
    """The cgroup of PID 1: the node's own."""
    try:
        return parse_cgroup(proc.cgroup(1))
    except GoneError:  # a /proc that hides other users' processes, or a tree of fixtures
        return "/"


def _nowhere() -> Mapping[ContainerKey, str]:
    return {}


class Claims:
    """Which cgroup holds each container's id. A second one that claims it is refused for as long as the first exists.

    Where a runtime reported the cgroup of its container, that one holds the id. Bounded: the least recently used go.
    """

    def __init__(self, exists: Callable[[str], bool]) -> None:
        self._exists = exists
        self._holders: OrderedDict[ContainerKey, str] = OrderedDict()
        self._logged: set[str] = set()
        self.refused = 0

    def admit(self, container: Container) -> Container:
        """The container, or what its cgroup is without the id that another one has."""
        if not is_hash(container.id):
            return container
        holder = self._holders.get(container.key)
        if holder is not None and holder != container.cgroup and self._exists(holder):
            self.refused += 1
            self._log(container, holder)
            return refused(container)
        self.assign(container.key, container.cgroup)
        return container

    def assign(self, key: ContainerKey, cgroup: str) -> bool:
        """Gives the id to this cgroup; whether another one had it."""
        before = self._holders.get(key)
        self._holders[key] = cgroup
        self._holders.move_to_end(key)
        if len(self._holders) > _MOST_IDS:
            self._holders.popitem(last=False)
        return before is not None and before != cgroup

    def _log(self, container: Container, holder: str) -> None:
        if container.cgroup in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(container.cgroup)
        claimed, held = printable(container.cgroup, 256), printable(holder, 256)
        _log.warning("cgroup %s claims to be %s, which is %s: refused", claimed, container.key, held)


class ContainerIndex:
    """One per agent. Not thread-safe: it belongs to the observing loop."""

    def __init__(
        self,
        procfs: Procfs | None = None,
        most_processes: int = _MOST_PROCESSES,
        placed: Callable[[], Mapping[ContainerKey, str]] = _nowhere,
    ) -> None:
        """`placed`: the cgroups that runtimes reported for ids that another cgroup claimed."""
        self._procfs = procfs or Procfs()
        self._most_processes = most_processes
        self._placed = placed
        self._known: OrderedDict[ProcessId, Container] = OrderedDict()
        self._init_path = path_of_init(self._procfs)
        self._tree = cgroup_tree(self._procfs)
        self._claims = Claims(self._tree.exists)
        self._owners: dict[str, tuple[int, int | None]] = {}  # directory → when it was asked, and the answer

    @property
    def refused(self) -> int:
        """Processes in a cgroup that claims the id of another one."""
        return self._claims.refused

    def correct(self) -> bool:
        """Takes over what runtimes reported since. True: the containers of processes may be others now."""
        placed = self._placed().items()
        changed = [self._claims.assign(key, cgroup) for key, cgroup in placed if self._tree.exists(cgroup)]
        if any(changed):
            self._known.clear()
        return any(changed)

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
            return self._identified(reported_path(cgroup_paths))

    def _read(self, process: ProcessId) -> Container:
        text = self._procfs.cgroup(process.tgid)
        # Asked after reading, so the text cannot be that of a later process under the same pid.
        now = self._procfs.stat(process.tgid)
        container = self._identified(parse_cgroup(text))
        # The dead may have been moved to the root already: what they did was not the host's doing.
        if now.start_ticks != process.start_ticks or (now.dead and container.key == HOST):
            raise GoneError(f"process {process.tgid} ended before its container was known")
        return container

    def _identified(self, path: str) -> Container:
        container = identify(path, self._init_path)
        if container.key != HOST and (owner := self._owner_above(container.cgroup)):
            container = identify(path, self._init_path, owner)
        return self._claims.admit(container)

    def _owner_above(self, cgroup: str) -> int | None:
        """As the tree has it, asked once in a while: a container's processes come and go by the thousand."""
        above, now = cgroup.rpartition("/")[0], monotonic_ns()
        known = self._owners.get(above)
        if known is None or now - known[0] > _OWNER_NS:
            if len(self._owners) >= _MOST_OWNERS:
                self._owners.clear()
            known = self._owners[above] = (now, self._tree.owner_uid(cgroup))
        return known[1]


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
            tgid: before[tgid] if tgid in before else self._belongs(tgid, container.cgroup)
            for tgid in self._listed(container.cgroup)
        }
        self._known[container.key] = now
        return {tgid for tgid, belongs in now.items() if belongs}

    def once(self, container: Container) -> set[int]:
        """The same for who asks no more: nothing is kept about the container."""
        try:
            return self.of(container)
        finally:
            self.forget(container.key)

    def forget(self, container: ContainerKey) -> None:
        """Drops what is kept about a container."""
        self._known.pop(container, None)

    def _belongs(self, tgid: int, cgroup: str) -> bool:
        try:
            return self._index.container_of(self._proc.process_id(tgid)).cgroup == cgroup
        except (GoneError, SetupError):
            return False

    def _listed(self, path: str) -> set[int]:
        """The tgids in that cgroup and below, in the first hierarchy that has any."""
        for hierarchy in hierarchies(parse_mounts(self._proc.mounts(os.getpid()))):
            if found := set(_members(Path(hierarchy.point) / path.lstrip("/"))):
                return found
        return set()


def _members(folder: Path) -> Iterator[int]:
    for here in folders(folder, _MOST_FOLDERS):
        try:
            text = Path(here, "cgroup.procs").read_text()
        except OSError:  # removed meanwhile, or threaded: then its domain lists its processes
            continue
        yield from (int(word) for word in text.split() if word != "0")
