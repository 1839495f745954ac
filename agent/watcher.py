# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The thread that hears of processes as they appear and die, and of kernel names, from the probes' ring buffers.

It hears of libraries that are written over, too, whose probes cannot wait for the next tick.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

from agent import layout
from agent.function_names import FunctionNames
from agent.libbpf import RingBuffer
from agent.members import Told
from agent.model import ProcessId
from agent.probes import Probes

_log = logging.getLogger(__name__)
_ROUND_MILLISECONDS = 500
_PAUSE_SECONDS = 0.1


class Listener(Protocol):
    """Who wants to know. Called from the watcher's thread."""

    def seen(self, told: Told) -> object:
        """A process made its first call."""
        ...

    def exited(self, process: ProcessId) -> object:
        """A process died."""
        ...

    def replaced(self, process: ProcessId) -> object:
        """A process runs another program now."""
        ...


class Watcher:
    """Calls the listener and fills `names` from its own thread, between `start` and `stop`."""

    def __init__(self, probes: Probes, listener: Listener, names: FunctionNames) -> None:
        self._probes, self._listener, self._names = probes, listener, names
        self._rings = [
            RingBuffer(probes.bpf.lib, probes.bpf.map_fd(name), self._guarded(receive))
            for name, receive in (("events", self._event), ("names", self._name))
        ]
        self.failures = 0
        self._ending = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stops listening."""
        self._ending.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for ring in self._rings:
            ring.close()

    def _run(self) -> None:
        waiting = select.poll()  # select() takes no descriptor beyond 1023
        waiting.register(self._wake, select.POLLIN)
        for ring in self._rings:
            waiting.register(ring.epoll_fd, select.POLLIN)
        changes = self._probes.changes.fileno()
        if changes is not None:
            waiting.register(changes, select.POLLIN)
        while not self._ending.is_set():
            ready = {descriptor for descriptor, _ in waiting.poll(_ROUND_MILLISECONDS)}
            try:
                if changes in ready:
                    self._probes.drop_changed()
                for ring in self._rings:
                    ring.consume()
            except Exception:  # noqa: BLE001  # one library or record must not end the hearing of all others
                self.failures += 1
                _log.exception("the watcher")
                self._ending.wait(_PAUSE_SECONDS)  # what fails at once, over and over, must not fill a core

    def _guarded(self, receive: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def guarded(record: bytes) -> None:
            try:
                receive(record)
            except Exception:  # noqa: BLE001  # called from C, which cannot pass it on
                _log.exception("a record of %d bytes", len(record))

        return guarded

    def _event(self, record: bytes) -> None:
        event = layout.Event.from_buffer_copy(record)
        if event.kind == layout.EVENT_PROCESS_SEEN:
            self._listener.seen(_told(layout.Seen.from_buffer_copy(record)))
        elif event.kind == layout.EVENT_PROCESS_EXIT:
            self._listener.exited(event.process.id())
        elif event.kind == layout.EVENT_PROCESS_EXEC:
            self._listener.replaced(event.process.id())

    def _name(self, record: bytes) -> None:
        name = layout.Name.from_buffer_copy(record.ljust(ctypes.sizeof(layout.Name), b"\0"))  # what is left out is 0
        if name.kind == layout.NAME_ALIAS:
            self._names.alias(name.process.id(), name.function, name.other)
        else:
            text = name.text.decode(errors="backslashreplace")
            self._names.learn(name.process.id(), name.function, text)


def _told(seen: layout.Seen) -> Told:
    comm = seen.command.decode(errors="surrogateescape")
    return Told(seen.event.process.id(), comm, seen.uid, (seen.unified.text(), seen.legacy.text()))
