# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A thread that repeats one step until it is stopped, and a job that has a thread only while it runs.

Invariants: an exception in a step is logged and counted, and never ends the thread; `stop` and `wake` are for any
thread and cut a wait short. A wait can also end when a file descriptor becomes readable. A step that blocks by itself
(poll, wait) has to be cut short by its owner.
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
from collections.abc import Callable, Collection
from typing import Final

_log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 1.0


class Worker:
    """`step` returns the seconds until the next step; None waits until `wake`. It is first called after
    `first_seconds`.

    `failed` says in the log what a step was for ("a tick", "a scrape"); after an exception the next step comes in
    `retry_seconds`. `readable` gives, before each wait, the file descriptors that end it when they can be read; not the
    wait after an exception, so that a step that fails on them does not spin.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        *,
        failed: str = "a step",
        first_seconds: float = 0.0,
        retry_seconds: float = RETRY_SECONDS,
        readable: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self.failures = 0  # steps that raised
        self._step, self._failed = step, failed
        self._first_seconds, self._retry_seconds = first_seconds, retry_seconds
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._readable = readable
        self._wake_lock = threading.Lock()
        self._wake_fd: int | None = None  # an eventfd, only while the thread polls file descriptors
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: a long step returns early."""
        return self._stopping.is_set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, once."""
        self._thread.start()

    def wake(self) -> None:
        """The next step begins at once, or as soon as the present one has ended."""
        with self._wake_lock:
            self._wake.set()
            if self._wake_fd is not None:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """No further step begins. Does not wait for the present one."""
        self._stopping.set()
        self.wake()

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Stops and waits for the thread; False when it still runs after the time-out."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        return not self.alive

    def _run(self) -> None:
        seconds: float | None = self._first_seconds
        readable: Collection[int] = ()
        while True:
            if seconds is None or seconds > 0:
                self._wait(seconds, readable)
            self._wake.clear()
            if self.stopping:
                return
            try:
                seconds = self._step()
                readable = self._readable() if self._readable is not None else ()
            except Exception:  # noqa: BLE001  # the next step may work
                self.failures += 1
                seconds, readable = self._retry_seconds, ()
                _log.exception("%s: %s failed", self._thread.name, self._failed)

    def _wait(self, seconds: float | None, readable: Collection[int]) -> None:
        try:
            wake_fd = os.eventfd(0) if readable else None
        except OSError:  # no descriptor is left: what is readable is noticed at the next step
            wake_fd = None
        if wake_fd is None:
            self._wake.wait(seconds)
            return
        try:
            with self._wake_lock:
                if self._wake.is_set():
                    return
                self._wake_fd = wake_fd
            poll = select.poll()  # select() takes no descriptor beyond 1023
            for descriptor in (wake_fd, *readable):
                poll.register(descriptor, select.POLLIN)
            poll.poll(None if seconds is None else math.ceil(seconds * 1000))
        finally:
            with self._wake_lock:
                self._wake_fd = None
            os.close(wake_fd)


class BackgroundJob:
    """`act` in a thread of its own, each time it is started; one run at a time. Between two runs there is no thread.

    An exception is logged and counted, and so is a thread that cannot be made: it may be made at the next start.
    `failed` says in the log what a run was for. `start` is for one thread.
    """

    def __init__(self, name: str, act: Callable[[], object], *, failed: str = "a run") -> None:
        self.failures = 0
        self._name, self._act, self._failed = name, act, failed
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> bool:
        """Begins a run. False when one is under way, or when no thread can be made now."""
        if self.running:
            return False
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory, or as many threads as there may be
            self.failures += 1
            _log.error("%s: %s cannot be started: %s", self._name, self._failed, error)
            return False
        self._thread = thread
        return True

    def wait(self) -> None:
        """Until the present run has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._act()
        except Exception:  # noqa: BLE001  # nothing else sees an exception of a thread
            self.failures += 1
            _log.exception("%s: %s failed", self._name, self._failed)
