# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The container that somebody means, and its processes that have libcuda mapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from agent.containers.index import ContainerIndex
from agent.errors import GoneError, SetupError, WardenError
from agent.model import Container, ContainerKey, ProcessId
from agent.procfs import Procfs

_LIBCUDA = re.compile(r"libcuda\.so(\.[0-9.]+)?")
_SHORTEST_ID = 4
_MOST_LISTED = 20


def choose(wanted: str, candidates: Iterable[Container]) -> Container:
    """The one container that `wanted` names: its key, name, pod or unit, or the beginning of its id.

    WardenError that lists the candidates when there is none, or more than one.
    """
    known = sorted(candidates, key=lambda container: container.name)
    for names in (_exact, _beginnings):
        found = [container for container in known if names(container, wanted)]
        if len(found) == 1:
            return found[0]
        if found:
            raise WardenError(f"{wanted} means more than one container, give the key of one: {_listed(found)}")
    if not known:
        raise WardenError(f"no container called {wanted}: no process on this node has libcuda mapped")
    raise WardenError(f"no container that uses a GPU is called {wanted}; those that do: {_listed(known)}")


def _exact(container: Container, wanted: str) -> bool:
    last = container.cgroup.rstrip("/").rpartition("/")[2]
    return wanted in (container.key, container.name, container.id, container.pod, container.cgroup, last)


def _beginnings(container: Container, wanted: str) -> bool:
    return len(wanted) >= _SHORTEST_ID and bool(container.id) and container.id.startswith(wanted)


def _listed(containers: list[Container]) -> str:
    shown = ", ".join(f"{container.name} ({container.key})" for container in containers[:_MOST_LISTED])
    more = len(containers) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


class Target:
    """Finds containers first, then, round by round, the processes of one. Only those with libcuda count.

    `named`: containers under the names that a running agent knows; a cgroup tells no more than their ids.
    """

    def __init__(self, proc: Procfs, named: Iterable[Container] = ()) -> None:
        self.proc, self._index = proc, ContainerIndex(proc)
        self._named = {container.key: container for container in named}
        self._elsewhere: set[ProcessId] = set()

    def find(self, wanted: str) -> Container:
        """The container that `wanted` names."""
        return choose(wanted, self._by_key().values())

    def processes(self, key: ContainerKey) -> Iterator[tuple[ProcessId, tuple[str, ...]]]:
        """Its processes of now, each with the paths of its libcuda as it sees them."""
        alive = set()
        for process in self._all():
            alive.add(process)
            if process in self._elsewhere:
                continue
            try:
                if self._index.container_of(process).key != key:
                    self._elsewhere.add(process)
                elif paths := self._libcuda(process):
                    yield process, paths
            except GoneError:
                continue
        self._elsewhere &= alive

    def _by_key(self) -> dict[ContainerKey, Container]:
        found = {}
        for process in self._all():
            try:
                if self._libcuda(process):
                    container = self._index.container_of(process)
                    found[container.key] = self._named.get(container.key, container)
            except (GoneError, SetupError):
                continue
        return found

    def _all(self) -> Iterator[ProcessId]:
        for tgid in self.proc.tgids():
            try:
                yield self.proc.process_id(tgid)
            except GoneError:
                continue

    def _libcuda(self, process: ProcessId) -> tuple[str, ...]:
        mapped = self.proc.mapped(process.tgid, lambda name: _LIBCUDA.fullmatch(name) is not None)
        return tuple(file.path for file in mapped if not file.deleted)
