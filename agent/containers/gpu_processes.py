# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The processes that use a GPU, each with its container and the devices that it can see.

Written by the agent's threads (a probe saw a process, NVML listed one), read by all: `all()` hands out an immutable
picture. A process stays until `remove`, so that its last figures can still be booked to its container. Containers are
under the names that are known by now, as of the last `refresh`; their keys never change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent.containers.index import ContainerIndex
from agent.errors import GoneError, SetupError
from agent.model import Container, Device, DeviceUuid, Process, ProcessId
from agent.names import printable
from agent.ordinals import VARIABLES, visible_devices
from agent.procfs import LONGEST_COMMAND, Procfs, user_name

_log = logging.getLogger(__name__)
_MOST = 16384
_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class Member:
    """One process."""

    process: Process
    container: Container
    visible: tuple[DeviceUuid, ...]
    sm_limit: float = 1.0  # share of the SMs that it may use as an MPS client


@dataclass(frozen=True, slots=True)
class Told:
    """A process as the kernel saw it while it lived; for when /proc has nothing any more."""

    process: ProcessId
    comm: str
    uid: int
    cgroup_paths: tuple[str, ...]  # the v2 one, then one of v1


def _as_it_is(container: Container) -> Container:
    return container


class Members:
    """The registry. `named` gives a container under the names that are known by now, at once."""

    def __init__(
        self,
        index: ContainerIndex,
        devices: Callable[[], Sequence[Device]],
        proc: Procfs,
        named: Callable[[Container], Container] = _as_it_is,
    ) -> None:
        self._index, self._devices, self.proc, self.named = index, devices, proc, named
        self._lock = threading.Lock()
        self._members: dict[ProcessId, Member] = {}
        self._all: tuple[Member, ...] | None = ()  # None: to be made when somebody asks
        self.refused = 0
        self.unreadable = 0  # looks at processes that this agent may not read

    def all(self) -> tuple[Member, ...]:
        """Everybody known now."""
        made = self._all
        if made is None:
            with self._lock:
                made = self._all = tuple(self._members.values())
        return made

    def get(self, process: ProcessId) -> Member | None:
        """None: never seen, or gone before it could be read."""
        return self._members.get(process)

    def see(self, process: ProcessId, told: Told | None = None) -> Member | None:
        """Makes a process known. None when it is gone already and nobody told about it, or when there are too many."""
        with self._lock:
            known = self._members.get(process)
            if known is not None:
                return known
            if len(self._members) >= _MOST:
                self.refused += 1
                return None
            member = self._read(process) or (self._believed(told) if told else None)
            if member is not None:
                self._members[process] = member
                self._all = None
            return member

    def renew(self, process: ProcessId) -> None:
        """It runs another program now: reads anew what is shown of it. Its container stays."""
        with self._lock:
            known = self._members.get(process)
            member = self._read(process) if known else None
            if known and member:
                self._members[process] = replace(member, container=known.container)
                self._all = None

    def refresh(self) -> None:
        """Takes up the names that became known since. No I/O; costs little where nothing changed."""
        with self._lock:
            containers = {member.container.key: member.container for member in self._members.values()}
            named = {key: self.named(container) for key, container in containers.items()}
            changed = {
                process: replace(member, container=container)
                for process, member in self._members.items()
                if (container := named[member.container.key]) is not member.container
            }
            if changed:
                self._members.update(changed)
                self._all = None

    def remove(self, processes: Iterable[ProcessId]) -> None:
        """They are gone and accounted for."""
        with self._lock:
            gone = list(processes)
            for process in gone:
                self._members.pop(process, None)
            self._index.forget(gone)
            self._all = None

    def _read(self, process: ProcessId) -> Member | None:
        tgid = process.tgid
        try:
            container = self._index.container_of(process)
            environment = self.proc.environ(tgid, (*VARIABLES, _MPS_PERCENTAGE))
            exposed = self.proc.gpu_minors(process)
            made = Process(process, self.proc.command(tgid), self.proc.user(tgid), container.key)
            if self.proc.process_id(tgid) != process:
                return None
        except GoneError:
            return None
        except SetupError as error:  # a security module's doing: one process must not hide all others
            if not self.unreadable:
                _log.warning("%s; its work stays unattributed, and the like is only counted from now on", error)
            self.unreadable += 1
            return None
        visible = visible_devices(environment, self._devices(), exposed)
        return Member(made, self.named(container), visible, _sm_limit(environment))

    def _believed(self, told: Told) -> Member:
        """Its environment went with it: which devices it saw is known only where there is just one."""
        container = self._index.container_of(told.process, told.cgroup_paths or ("/",))
        command = f"[{printable(told.comm, LONGEST_COMMAND - 2)}]"
        made = Process(told.process, command, user_name(told.uid), container.key)
        devices = self._devices()
        return Member(made, self.named(container), (devices[0].uuid,) if len(devices) == 1 else ())


def _sm_limit(environment: Mapping[str, str]) -> float:
    """1 where nothing, or nothing that MPS would accept, is set."""
    try:
        percentage = float(environment.get(_MPS_PERCENTAGE, "100"))
    except ValueError:
        return 1.0
    return percentage / 100 if 0 < percentage <= 100 else 1.0
