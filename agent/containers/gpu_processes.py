# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The processes that use a GPU, each with its container and the devices that it can use.

Written by the agent's threads (a probe saw a process, NVML listed one), read by all: `all()` returns an immutable
snapshot. A process stays until `remove`, so that its last figures can still be attributed to its container. Containers
have the names that are known as of the last `refresh`; their keys never change.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from agent.containers.index import ContainerIndex
from agent.core.device_ordinals import VARIABLES, Ordinals, visible_devices
from agent.core.errors import GoneError, SetupError
from agent.core.model import HOST, Container, ContainerKey, Device, DeviceUuid, Process, ProcessId
from agent.core.text import printable
from agent.node.procfs import LONGEST_COMMAND, Procfs, user_name

_log = logging.getLogger(__name__)
_MOST = 16384
_MOST_OF_ONE_CONTAINER = 4096
_MPS_SERVER = "nvidia-cuda-mps-server"
_MPS_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with its container and the devices that it can use."""

    process: Process
    container: Container
    visible: Ordinals  # by its ordinals
    sm_limit: float = 1.0  # share of the SMs that it may use as an MPS client
    by_environment: Ordinals = ()  # what its first environment says of `visible`, which is all that is known at first

    @property
    def devices(self) -> frozenset[DeviceUuid]:
        """Those of `visible` that are known."""
        return frozenset(device for device in self.visible if device is not None)

    @property
    def is_mps_server(self) -> bool:
        """Whether it runs kernels for its clients."""
        return self.process.command.split(" ")[0].rpartition("/")[2] == _MPS_SERVER


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """A process as the probes reported it, for when it is no longer in /proc."""

    process: ProcessId
    comm: str
    uid: int
    cgroup_paths: tuple[str, ...]  # the v2 one, then one of v1
    environment: Mapping[str, str] | None = None  # those of VARIABLES that are set; None: not known


def _unnamed(container: Container) -> Container:
    return container


def _none(_: Container) -> Collection[int]:
    return ()


class VisibleDevices:
    """Which devices a process sees: by its environment, and by the device files in its container.

    `residents`: the tgids of a container's processes, whether they use a GPU or not.
    """

    def __init__(
        self,
        devices: Callable[[], Sequence[Device]],
        proc: Procfs,
        residents: Callable[[Container], Collection[int]],
    ) -> None:
        self._devices, self._proc, self._residents = devices, proc, residents
        self._exposed: dict[ContainerKey, Collection[int] | None] = {}  # minor numbers, as last read; None: all

    def of(self, process: ProcessId, container: Container, environment: Mapping[str, str]) -> Ordinals:
        """Of a process that is there. GoneError."""
        return visible_devices(environment, self._devices(), self._read(process, container))

    def of_gone(self, container: Container, environment: Mapping[str, str] | None) -> Ordinals:
        """Of one that has ended, if its environment is known, and another one of its container is there or was read."""
        devices = self._devices()
        if len(devices) == 1:
            return (devices[0].uuid,)
        if environment is None:
            return ()
        if container.key == HOST:
            return visible_devices(environment, devices)
        if container.key not in self._exposed:
            self._read_any(container)
        if container.key not in self._exposed:
            return ()
        return visible_devices(environment, devices, self._exposed[container.key])

    def _read_any(self, container: Container) -> None:
        for tgid in self._residents(container):
            with suppress(GoneError, SetupError):
                self._read(self._proc.process_id(tgid), container)
                return

    def _read(self, process: ProcessId, container: Container) -> Collection[int] | None:
        exposed = self._proc.gpu_minors(process)
        self._proc.require(process)
        if len(self._exposed) >= _MOST:
            self._exposed.clear()
        self._exposed[container.key] = exposed
        return exposed


class GpuProcessRegistry:
    """The registry. `named` returns a container with the names that are known by now, without waiting."""

    def __init__(
        self,
        index: ContainerIndex,
        devices: Callable[[], Sequence[Device]],
        proc: Procfs,
        named: Callable[[Container], Container] = _unnamed,
        residents: Callable[[Container], Collection[int]] = _none,
    ) -> None:
        """`residents`: the tgids of a container's processes, whether they use a GPU or not."""
        self._index, self.proc, self.named = index, proc, named
        self._visible = VisibleDevices(devices, proc, residents)
        self._lock = threading.Lock()
        self._members: dict[ProcessId, GpuProcess] = {}
        self._all: tuple[GpuProcess, ...] | None = ()  # None: stale, made by the next all()
        self.refused = 0
        self.refused_of: dict[ContainerKey, int] = {}  # processes of containers that have their share
        self._held: Counter[ContainerKey] = Counter()
        self._outside: dict[ProcessId, ContainerKey] = {}  # processes that were refused: they are not read every tick
        self.unreadable = 0  # looks at processes that this agent may not read

    def all(self) -> tuple[GpuProcess, ...]:
        """All known processes."""
        made = self._all
        if made is None:
            with self._lock:
                made = self._all = tuple(self._members.values())
        return made

    def get(self, process: ProcessId) -> GpuProcess | None:
        """None: never seen, or gone before it could be read."""
        return self._members.get(process)

    def see(self, process: ProcessId, event: ProcessEvent | None = None) -> GpuProcess | None:
        """Makes a process known. None when it has ended and there is no event, or when there are too many."""
        with self._lock:
            known = self._members.get(process)
            if known is not None:
                return known
            if len(self._members) >= _MOST:
                self.refused += 1
                return None
            if process in self._outside and not self._has_room(self._outside[process]):
                return None
            member = self._read(process) or (self._from_event(event) if event else None)
            if member is None or not self._has_room(member.container.key):
                if member is not None:
                    self._refuse(process, member.container.key)
                return None
            self._outside.pop(process, None)
            self._held[member.container.key] += 1
            self._members[process] = member
            self._all = None
            return member

    def outside(self, process: ProcessId) -> ContainerKey | None:
        """The container of a process that was refused because its container has its share: no rule reaches it."""
        return self._outside.get(process)

    def _has_room(self, container: ContainerKey) -> bool:
        """Whether a container may have one process more.

        No more than there are places left, so that whatever others took, the next one finds some: the dynamic
        thresholds of Choudhury and Hahne (IEEE/ACM Transactions on Networking 6(2), 1998).
        """
        left = _MOST - len(self._members)
        return self._held[container] < (left if container == HOST else min(left, _MOST_OF_ONE_CONTAINER))

    def _refuse(self, process: ProcessId, container: ContainerKey) -> None:
        if len(self._outside) >= _MOST:
            self._outside.clear()  # nearly all have ended; the others are refused anew
        self._outside[process] = container
        self.refused_of = {**self.refused_of, container: self.refused_of.get(container, 0) + 1}

    def renew(self, process: ProcessId) -> None:
        """Reads a process again after exec. Its container stays."""
        with self._lock:
            known = self._members.get(process)
            member = self._read(process) if known else None
            if known and member:
                self._members[process] = replace(member, container=known.container)
                self._all = None

    def refresh(self) -> None:
        """Applies the names that became known since. No I/O; cheap where nothing changed."""
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

    def identify_again(self) -> None:
        """Looks all processes' containers up anew: an id was found to be another cgroup's."""
        with self._lock:
            for process, member in self._members.items():
                try:
                    container = self._index.container_of(process)
                except (GoneError, SetupError):  # its last figures are its former container's
                    continue
                if container.key != member.container.key:
                    made = replace(member.process, container=container.key)
                    self._members[process] = replace(member, process=made, container=self.named(container))
                    self._all = None

    def place(self, ordinals: Mapping[ProcessId, Ordinals]) -> None:
        """The devices behind these processes' ordinals are others than their environment says; of the rest it holds."""
        with self._lock:
            for process, member in self._members.items():
                visible = ordinals.get(process, member.by_environment)
                if visible != member.visible:
                    self._members[process] = replace(member, visible=visible)
                    self._all = None

    def remove(self, processes: Iterable[ProcessId]) -> None:
        """Drops processes that have ended and are accounted for."""
        with self._lock:
            gone = list(processes)
            for process in gone:
                self._outside.pop(process, None)
                if (member := self._members.pop(process, None)) is not None:
                    self._held[member.container.key] -= 1
            self._index.forget(gone)
            self._all = None

    def _read(self, process: ProcessId) -> GpuProcess | None:
        tgid = process.tgid
        try:
            container = self._index.container_of(process)
            environment = self.proc.environ(tgid, (*VARIABLES, _MPS_PERCENTAGE))
            made = Process(process, self.proc.command(tgid), self.proc.user(tgid), container.key)
            visible = self._visible.of(process, container, environment)
        except GoneError:
            return None
        except SetupError as error:  # denied by a security module: one process must not hide all others
            if not self.unreadable:
                _log.warning("%s; its work stays unattributed; further cases are only counted", error)
            self.unreadable += 1
            return None
        return GpuProcess(made, self.named(container), visible, _sm_limit(environment), visible)

    def _from_event(self, event: ProcessEvent) -> GpuProcess:
        """One that has ended."""
        container = self._index.container_of(event.process, event.cgroup_paths or ("/",))
        command = f"[{printable(event.comm, LONGEST_COMMAND - 2)}]"
        made = Process(event.process, command, user_name(event.uid), container.key)
        visible = self._visible.of_gone(container, event.environment)
        return GpuProcess(made, self.named(container), visible, by_environment=visible)


def _sm_limit(environment: Mapping[str, str]) -> float:
    """The client's share of the SMs by its environment; 1 where unset or not valid for MPS."""
    try:
        percentage = float(environment.get(_MPS_PERCENTAGE, "100"))
    except ValueError:
        return 1.0
    return percentage / 100 if 0 < percentage <= 100 else 1.0
