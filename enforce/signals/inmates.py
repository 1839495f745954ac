# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which processes are in a container: all of them, not only those that use a GPU.

A process is looked at while it is young, since a runtime moves it into its container before it starts the program, and
then now and then, since its number may be another's by then. So a look costs little, however many processes there are.
"""

from __future__ import annotations

from collections.abc import Collection

from agent.containers.cgroup import parse_cgroup
from agent.containers.identity import identify
from agent.errors import GoneError, SetupError
from agent.model import ContainerKey, ProcessId
from agent.procfs import Procfs

_YOUNG_LOOKS = 8
_ROUNDS = 16  # the others are looked at once in so many


class Inmates:
    """One look after another. Not thread-safe."""

    def __init__(self, proc: Procfs) -> None:
        self._proc = proc
        self._looks: dict[int, int] = {}
        self._found: dict[int, tuple[ProcessId, ContainerKey]] = {}
        self._wanted: frozenset[ContainerKey] = frozenset()
        self._round = 0
        self._init_path: str | None = None

    def look(self, containers: Collection[ContainerKey]) -> dict[ContainerKey, set[ProcessId]]:
        """Those of the containers' processes that live now."""
        self._round += 1
        if not self._wanted.issuperset(containers):
            self._looks.clear()  # somebody is wanted who was not before
        self._wanted = frozenset(containers)
        tgids = set(self._proc.tgids())
        self._looks = {tgid: looks for tgid, looks in self._looks.items() if tgid in tgids}
        self._found = {tgid: found for tgid, found in self._found.items() if self._stays(*found)}
        for tgid in tgids:
            looks = self._looks.get(tgid, 0)
            if looks < _YOUNG_LOOKS or (tgid + self._round) % _ROUNDS == 0:
                self._looks[tgid] = looks + 1
                self._look_at(tgid)
        there: dict[ContainerKey, set[ProcessId]] = {container: set() for container in containers}
        for process, container in self._found.values():
            there[container].add(process)
        return there

    def _stays(self, process: ProcessId, container: ContainerKey) -> bool:
        return container in self._wanted and self._proc.is_alive(process)

    def _look_at(self, tgid: int) -> None:
        self._found.pop(tgid, None)
        try:
            process = self._proc.process_id(tgid)
            container = identify(parse_cgroup(self._proc.cgroup(tgid)), self._path_of_init()).key
            if container in self._wanted and self._proc.is_alive(process):
                self._found[tgid] = (process, container)
        except (GoneError, SetupError):  # it ended, or may not be looked at: then none of its calls count
            return

    def _path_of_init(self) -> str:
        if self._init_path is None:
            self._init_path = parse_cgroup(self._proc.cgroup(1))
        return self._init_path
