# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether the agent is ready and alive: sd_notify(3) for the service manager, /livez and /readyz for probes.

Alive: ticks complete, and where a policy is in force decisions are made. Ready: the first tick is complete, and at
least one of the copies of libcuda that were found has probes; where none was found yet there is nothing to attach to,
and the agent is ready for the first one. The answers contain no names, so they need no password.

Invariants of notifications: sending never blocks and never raises; what could not be sent is sent with the next
message; the watchdog is reset by complete ticks only, and by none while decisions hang (sd_watchdog(3)).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.model import Snapshot

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_MAX_UNSENT = 8
_INTERVALS = 4  # without a tick, before an agent that ticks rarely counts as hanging


class Notifier:
    """sd_notify(3). `tick` is for the observing thread, the rest for the main one. `failures`: messages not sent."""

    def __init__(
        self, address: str = "", watchdog_us: int = 0, decided_ns: Callable[[], int | None] = lambda: None
    ) -> None:
        """`watchdog_us`: how long the manager waits for a sign of life; 0: for ever.

        `decided_ns`: when the last decision was completed; None while none are made.
        """
        self._decided_ns = decided_ns
        self._address = _address(address)
        self._watchdog_us = watchdog_us
        self._sending = threading.Lock()
        self._unsent: tuple[str, ...] = ()
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._decided: int | None = None  # at the last tick
        self._status = ""
        self.failures = 0

    @classmethod
    def of(cls, environment: MutableMapping[str, str], decided_ns: Callable[[], int | None]) -> Notifier:
        """From the manager's variables, which are removed: they are for this process and none of its children."""
        address, patience, pid = (environment.pop(name, "") for name in _VARIABLES)
        watched = patience.isdecimal() and pid in ("", str(os.getpid()))
        return cls(address, int(patience) if watched else 0, decided_ns)

    def ready(self, interval_ns: int) -> None:
        """The agent serves. One that ticks more rarely than the unit expects asks for a longer watchdog."""
        needed_us = _INTERVALS * interval_ns // 1000
        longer = (f"WATCHDOG_USEC={needed_us}",) if 0 < self._watchdog_us < needed_us else ()
        self._send("READY=1", *longer)

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """While the block runs the manager shows the unit as reloading."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._send("READY=1")

    def stopping(self) -> None:
        """The agent ends, of its own accord or on a signal."""
        self._send("STOPPING=1")

    def tick(self, snapshot: Snapshot) -> None:
        """After each tick that is complete."""
        lines = ["WATCHDOG=1"] if self._watchdog_us and self._decides() else []
        status = _status(snapshot)
        if status != self._status:
            self._status = status
            lines.append(f"STATUS={status}")
        if lines or self._unsent:
            self._send(*lines)

    def _decides(self) -> bool:
        """Whether a decision was completed since the last tick, where decisions are made."""
        before, self._decided = self._decided, self._decided_ns()
        return self._decided is None or self._decided != before

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        with self._sending:
            message = (*self._unsent, *lines)
            try:
                self._socket.sendto("\n".join(message).encode(), socket.MSG_NOSIGNAL, self._address)
            except OSError as error:  # its queue is full, or it is being restarted
                self._unsent = tuple(line for line in message if line != "WATCHDOG=1")[-_MAX_UNSENT:]
                self.failures += 1
                _log.debug("the service manager was not notified: %s", error)
            else:
                self._unsent = ()

    def close(self) -> None:
        """Nothing is sent any more."""
        with self._sending:
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


START_NS: Final = 60 * NS_PER_SECOND  # for the first tick: every copy of libcuda is attached before it
SLACK_NS: Final = 10 * NS_PER_SECOND
MISSED: Final = 5  # ticks
_PLAIN: Final = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
Check = Callable[[], str | None]  # why it fails; None: it passes


class Health:
    """The checks of /livez and /readyz. `decided_ns`: when the last decision was made; None while none are made."""

    def __init__(
        self,
        get_snapshot: Callable[[], Snapshot | None],
        decided_ns: Callable[[], int | None],
        interval_ns: int,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._get_snapshot, self._decided_ns, self._now_ns = get_snapshot, decided_ns, now_ns
        self._patience_ns = MISSED * interval_ns + SLACK_NS
        self._began_ns = now_ns()

    def routes(self) -> Mapping[str, WSGIApplication]:
        """By path."""
        return {"/livez": _application(self.not_alive), "/readyz": _application(self.not_ready)}

    def not_alive(self) -> str | None:
        """Why the agent should be restarted; None: it works."""
        snapshot, now = self._get_snapshot(), self._now_ns()
        if snapshot is None:
            started = now - self._began_ns <= START_NS
            return None if started else f"no tick was completed in the {_seconds(now - self._began_ns)} since the start"
        if now - snapshot.at_ns > self._patience_ns:
            return f"no tick was completed for {_seconds(now - snapshot.at_ns)}"
        decided = self._decided_ns()
        if decided is not None and now - decided > self._patience_ns:
            return f"no decision was completed for {_seconds(now - decided)}"
        return None

    def not_ready(self) -> str | None:
        """Why its figures are incomplete yet; None: it observes what there is."""
        snapshot = self._get_snapshot()
        if snapshot is None:
            return "the first tick is not complete"
        if snapshot.probes and not any(library.attached for library in snapshot.probes):
            return f"{len(snapshot.probes)} copies of libcuda were found and no probe could be attached: see the log"
        return None


def _application(check: Check) -> WSGIApplication:
    def application(_: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        why = check()
        start_response("200 OK" if why is None else "503 Service Unavailable", [*_PLAIN])
        return [b"ok\n" if why is None else f"{why}\n".encode()]

    return application


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_SECOND:.0f} s"
