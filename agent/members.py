# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The processes that use a GPU, each with its container and the devices that it can see.

Written by the agent's threads (a probe saw a process, NVML listed one), read by all: `all()` hands out an immutable
picture. A process stays until `remove`, so that its last figures can still be booked to its container.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent.containers.index import ContainerIndex
from agent.errors import GoneError
from agent.model import Container, Device, DeviceUuid, Process, ProcessId
from agent.ordinals import visible_devices
from agent.procfs import Procfs

_MOST = 16384


@dataclass(frozen=True, slots=True)
class Member:
    """One process."""

    process: Process
    container: Container
    visible: tuple[DeviceUuid, ...]


class Members:
    """The registry."""

    def __init__(self, index: ContainerIndex, devices: Callable[[], Sequence[Device]], proc: Procfs) -> None:
        self._index, self._devices, self.proc = index, devices, proc
        self._lock = threading.Lock()
        self._members: dict[ProcessId, Member] = {}
        self._all: tuple[Member, ...] = ()
        self.refused = 0

    def all(self) -> tuple[Member, ...]:
        """Everybody known now."""
        return self._all

    def get(self, process: ProcessId) -> Member | None:
        """None: never seen, or gone before it could be read."""
        return self._members.get(process)

    def see(self, process: ProcessId) -> Member | None:
        """Makes a process known. None when it is gone already, or when there are too many."""
        with self._lock:
            known = self._members.get(process)
            if known is not None:
                return known
            if len(self._members) >= _MOST:
                self.refused += 1
                return None
            member = self._read(process)
            if member is not None:
                self._members[process] = member
                self._all = tuple(self._members.values())
            return member

    def remove(self, processes: Iterable[ProcessId]) -> None:
        """They are gone and accounted for."""
        with self._lock:
            gone = list(processes)
            for process in gone:
                self._members.pop(process, None)
            self._index.forget(gone)
            self._all = tuple(self._members.values())

    def _read(self, process: ProcessId) -> Member | None:
        tgid = process.tgid
        try:
            container = self._index.container_of(process)
            environment = self.proc.environ(tgid, ("CUDA_VISIBLE_DEVICES",))
            made = Process(process, self.proc.command(tgid), self.proc.user(tgid), container.key)
            if self.proc.process_id(tgid) != process:
                return None
        except GoneError:
            return None
        return Member(made, container, visible_devices(environment, self._devices()))
