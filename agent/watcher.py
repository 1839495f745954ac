# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The thread that hears of processes as they appear and die, from the probes' ring buffer."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable

from agent import layout
from agent.libbpf import RingBuffer
from agent.model import ProcessId
from agent.probes import Probes

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 0.5


class Watcher:
    """Calls `seen` and `exited` from its own thread, between `start` and `stop`."""

    def __init__(
        self, probes: Probes, seen: Callable[[ProcessId], object], exited: Callable[[ProcessId], object]
    ) -> None:
        self._seen, self._exited = seen, exited
        self._ring = RingBuffer(probes.bpf.lib, probes.bpf.map_fd("events"), self._receive)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stops listening."""
        self._ending.set()
        self._thread.join()
        self._ring.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            select.select([self._ring.epoll_fd], [], [], _ROUND_SECONDS)
            self._ring.consume()

    def _receive(self, record: bytes) -> None:
        event = layout.Event.from_buffer_copy(record)
        process = event.process.id()
        try:
            if event.kind == layout.EVENT_PROCESS_SEEN:
                self._seen(process)
            elif event.kind == layout.EVENT_PROCESS_EXIT:
                self._exited(process)
        except Exception:  # noqa: BLE001  # called from C, which cannot pass it on
            _log.exception("process %s", process)
