# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the service manager hears of the agent: ready, alive, reloading, ending. Source: sd_notify(3), sd_watchdog(3).

Nothing is said where nobody listens. Invariants: saying never waits and never raises, and what could not be said is
said together with the next message; the watchdog hears only of ticks that are complete, and of none while decisions
hang.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

from agent.model import Snapshot

_log = logging.getLogger(__name__)
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_MOST_UNSAID = 8
_INTERVALS = 4  # without a tick, before an agent that ticks rarely counts as hanging


class Notifier:
    """`tick` is for the observing thread, the rest for the main one. `failures`: messages that nobody took."""

    def __init__(self, address: str = "", watchdog_us: int = 0) -> None:
        """`watchdog_us`: how long the manager waits for a sign of life; 0: for ever."""
        self.decided_ns: Callable[[], int | None] = lambda: None  # when the last decision was; None: none are made
        self._address = _address(address)
        self._watchdog_us = watchdog_us
        self._saying = threading.Lock()
        self._unsaid: tuple[str, ...] = ()
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._decided: int | None = None  # at the last tick
        self._status = ""
        self.failures = 0

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Notifier:
        """What the manager said to this process, and to none of its children: the variables are taken away."""
        address, patience, pid = (environment.pop(name, "") for name in _VARIABLES)
        watched = patience.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(patience) if watched else 0)

    def ready(self, interval_ns: int) -> None:
        """Everything answers. An agent that ticks more rarely than the unit expects asks for more patience."""
        needed_us = _INTERVALS * interval_ns // 1000
        longer = (f"WATCHDOG_USEC={needed_us}",) if 0 < self._watchdog_us < needed_us else ()
        self._say("READY=1", *longer)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """While the block runs the manager knows that what it asked for is under way."""
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._say("READY=1")

    def stopping(self) -> None:
        """The agent ends, of its own accord or because it was told to."""
        self._say("STOPPING=1")

    def tick(self, snapshot: Snapshot) -> None:
        """After each tick that is complete."""
        lines = ["WATCHDOG=1"] if self._watchdog_us and self._goes_on() else []
        status = _status(snapshot)
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        if lines or self._unsaid:
            self._say(*lines)

    def _goes_on(self) -> bool:
        """Whether a decision was completed since the last tick, where decisions are made."""
        before, self._decided = self._decided, self.decided_ns()
        return self._decided is None or self._decided != before

    def _say(self, *lines: str) -> None:
        if self._socket is None:
            return
        with self._saying:
            message = (*self._unsaid, *lines)
            try:
                self._socket.sendto("\n".join(message).encode(), socket.MSG_NOSIGNAL, self._address)
            except OSError as error:  # its queue is full, or it is being restarted
                self._unsaid = tuple(line for line in message if line != "WATCHDOG=1")[-_MOST_UNSAID:]
                self.failures += 1
                _log.debug("the service manager was not told: %s", error)
            else:
                self._unsaid = ()

    def close(self) -> None:
        """Says nothing more."""
        with self._saying:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def _address(text: str) -> str:
    """As the kernel wants it; "" for what is no UNIX socket (a virtual machine's vsock, say)."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else ""


def _status(snapshot: Snapshot) -> str:
    containers, devices = len(snapshot.containers), len(snapshot.devices)
    doing = "enforcing" if snapshot.enforcing else "observing"
    return f"{doing}: {containers} container{'s' * (containers != 1)} on {devices} device{'s' * (devices != 1)}"
