# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The consumer of the probes' ring buffers: processes that appear and end, and the names of kernel functions.

Its thread detaches from libraries that are being written over, too, which cannot wait for the next tick.

`FunctionNames` keeps handle → name per process, as the program got them from the driver. Bounded by handles; equal
names are kept once, since a hundred processes of one image have the same ones. The event reader's thread writes it, the
observer's reads it.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from typing import Protocol

from agent.containers.gpu_processes import ProcessEvent
from agent.core.model import ProcessId
from agent.core.text import printable
from agent.core.worker import Worker
from agent.probes import abi
from agent.probes.libbpf import RingBuffer
from agent.probes.libcuda import LibcudaProbes

_log = logging.getLogger(__name__)
_MOST = 100_000  # handles
LONGEST = 255  # characters
_SLACK = 1024


class FunctionNames:
    """Names of kernel functions by process and handle. `refused`: names for which there was no room.

    The processes of one `owner` have no more than there is room left, so that the next one's find some.
    """

    def __init__(self, most: int = _MOST, owner: Callable[[ProcessId], Hashable] = lambda process: process) -> None:
        self._most, self._count, self._owner = most, 0, owner
        self._names: dict[ProcessId, dict[int, str]] = {}
        self._owners: dict[ProcessId, Hashable] = {}
        self._held: Counter[Hashable] = Counter()
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self.refused = 0

    def __len__(self) -> int:
        return self._count

    def learn(self, process: ProcessId, function: int, name: str) -> None:
        """Sets a handle's name; handles are reused as modules are unloaded and loaded."""
        text = printable(name, LONGEST)
        with self._lock:
            names = self._names.get(process)
            if names is None or function not in names:
                if not self._take_place(process):
                    self.refused += 1
                    return
                names = self._names.setdefault(process, {})
            names[function] = self._texts.setdefault(text, text)

    def _take_place(self, process: ProcessId) -> bool:
        owner = self._owners.get(process)
        if owner is None:
            owner = self._owner(process)
        if self._held[owner] >= self._most - self._count:
            return False
        self._owners[process] = owner
        self._held[owner] += 1
        self._count += 1
        return True

    def alias(self, process: ProcessId, function: int, other: int) -> None:
        """Gives `function` the name of `other`."""
        name = self.name(process, other)
        if name:
            self.learn(process, function, name)

    def name(self, process: ProcessId, function: int) -> str:
        """ "" where it is unknown."""
        return self._names.get(process, {}).get(function, "")

    def all(self) -> dict[ProcessId, dict[int, str]]:
        """A copy of all names, by process and handle."""
        with self._lock:
            return {process: dict(names) for process, names in self._names.items()}

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops the names of processes that ended."""
        with self._lock:
            for process in processes:
                dropped = len(self._names.pop(process, ()))
                self._count -= dropped
                self._held.subtract({self._owners.pop(process, None): dropped})
            self._held = +self._held
            if len(self._texts) > 2 * self._count + _SLACK:
                self._texts = {text: text for names in self._names.values() for text in names.values()}

    def retain(self, wanted: Callable[[ProcessId], bool]) -> None:
        """Drops the names of all other processes: one may have come in after its process was forgotten."""
        self.forget([process for process in list(self._names) if not wanted(process)])


_ROUND_SECONDS = 0.5
# Records of each ring in one round: a ring that fills faster than it is read delays neither the other nor the rest.
_MOST_A_ROUND = 1024
_RETRY_SECONDS = 0.1  # what fails at once, over and over, must not fill a core


class ProcessListener(Protocol):
    """Receives the events of processes, on one thread at a time."""

    def seen(self, event: ProcessEvent) -> object:
        """A process made its first call."""
        ...

    def exited(self, process: ProcessId) -> object:
        """A process ended."""
        ...

    def replaced(self, process: ProcessId) -> object:
        """A process runs another program now."""
        ...


class EventReader:
    """Calls the listener and fills `names` from its own thread, from `start` to `stop`, and from `drain`."""

    def __init__(self, probes: LibcudaProbes, listener: ProcessListener, names: FunctionNames) -> None:
        self._probes, self._listener, self._names = probes, listener, names
        self._reading = threading.Lock()  # a ring has one reader
        self._rings = [
            RingBuffer(probes.bpf.lib, probes.bpf.map_fd(name), self._guarded(receive))
            for name, receive in (("events", self._event), ("names", self._name))
        ]
        self._worker = Worker(
            "events", self._step, failed="reading events", retry_seconds=_RETRY_SECONDS, readable=self._descriptors
        )

    @property
    def failures(self) -> int:
        """Rounds in which reading failed."""
        return self._worker.failures

    def start(self) -> None:
        """Starts the thread."""
        self._worker.start()

    def drain(self) -> None:
        """Handles the events that wait, a round of them at most: a process is reported before it is counted."""
        with self._reading:
            self._rings[0].consume(_MOST_A_ROUND)

    def stop(self) -> None:
        """Stops the thread; what the rings hold is not read any more."""
        self._worker.close()
        for ring in self._rings:
            ring.close()

    def _descriptors(self) -> list[int]:
        changes = self._probes.changes_fd()
        return [*(ring.epoll_fd for ring in self._rings), *([changes] if changes is not None else ())]

    def _step(self) -> float:
        self._probes.drop_changed()
        for ring in self._rings:
            with self._reading:
                ring.consume(_MOST_A_ROUND)
        return _ROUND_SECONDS

    def _guarded(self, receive: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def guarded(record: bytes) -> None:
            try:
                receive(record)
            except Exception:  # noqa: BLE001  # called from C, which cannot pass it on
                _log.exception("a record of %d bytes could not be handled", len(record))

        return guarded

    def _event(self, record: bytes) -> None:
        event = abi.Event.from_buffer_copy(record)
        if event.kind == abi.EVENT_PROCESS_SEEN:
            self._listener.seen(_process_event(abi.Seen.from_buffer_copy(record)))
        elif event.kind == abi.EVENT_PROCESS_EXIT:
            self._listener.exited(event.process.id())
        elif event.kind == abi.EVENT_PROCESS_EXEC:
            self._listener.replaced(event.process.id())

    def _name(self, record: bytes) -> None:
        name = abi.Name.from_buffer_copy(record.ljust(ctypes.sizeof(abi.Name), b"\0"))  # what is left out is 0
        if name.kind == abi.NAME_ALIAS:
            self._names.alias(name.process.id(), name.function, name.other)
        else:
            text = name.text.decode(errors="backslashreplace")
            self._names.learn(name.process.id(), name.function, text)


def _process_event(seen: abi.Seen) -> ProcessEvent:
    comm = seen.command.decode(errors="surrogateescape")
    paths = (seen.unified.text(), seen.legacy.text())
    return ProcessEvent(seen.event.process.id(), comm, seen.uid, paths, _environment(seen))


def _environment(seen: abi.Seen) -> dict[str, str] | None:
    """What decides on its devices; None: it could not be read to its end."""
    if not seen.environment & abi.ENVIRONMENT_READ:
        return None
    found = {}
    if seen.environment & abi.ENVIRONMENT_VISIBLE:
        found["CUDA_VISIBLE_DEVICES"] = seen.visible.decode(errors="surrogateescape")
    if seen.environment & abi.ENVIRONMENT_BUS_ORDER:
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return found
