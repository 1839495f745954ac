# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What MPS looks like now: daemons, servers, clients, and who of the known processes reaches which.

Asking takes time and a daemon may hang, so a thread of its own looks now and then, and the deciding thread reads the
last picture. A daemon that does not answer is in the picture too, with its error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import GoneError, SetupError
from agent.model import DeviceUuid, ProcessId
from agent.procfs import Procfs
from enforce.mps.clients import seen_as
from enforce.mps.control import connect
from enforce.mps.daemons import daemons, reaches
from enforce.mps.model import Client, Control, Daemon, MpsError, Scope, Server

_log = logging.getLogger(__name__)
EACH_NS = 2 * NS_PER_SECOND
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """One daemon as it was found. `reached`: known processes → the scopes that their next context would be in."""

    daemon: Daemon
    error: str | None = None
    control: Control | None = None
    servers: tuple[Server, ...] = ()
    clients: tuple[Client, ...] = ()
    scopes: tuple[Scope, ...] = ()
    ordinals: tuple[tuple[DeviceUuid, int], ...] = ()
    device_clients: tuple[tuple[DeviceUuid, tuple[int, ...]], ...] = ()  # pids as the daemon sees them
    reached: tuple[tuple[ProcessId, frozenset[Scope]], ...] = ()
    connected: tuple[tuple[ProcessId, Client], ...] = ()


@dataclass(frozen=True, slots=True)
class Picture:
    """All daemons, at one time."""

    at_ns: int
    places: tuple[Place, ...] = ()


class Survey:
    """Owns the picture. `poke` and `picture` are for the deciding thread."""

    def __init__(self, proc: Procfs, each_ns: int = EACH_NS) -> None:
        self._proc, self._each_ns = proc, each_ns
        self._thread: threading.Thread | None = None
        self.picture: Picture | None = None
        self.listeners: list[Callable[[Picture], None]] = []  # called by the looking thread
        self.failures = 0

    def poke(self, processes: Iterable[ProcessId]) -> None:
        """Has a look taken, if none is under way and the last one is old."""
        if self._thread is not None and self._thread.is_alive():
            return
        if self.picture is not None and monotonic_ns() - self.picture.at_ns < self._each_ns:
            return
        known = tuple(processes)
        self._thread = threading.Thread(target=self._look, args=(known,), name="mps-survey", daemon=True)
        self._thread.start()

    def _look(self, processes: tuple[ProcessId, ...]) -> None:
        try:
            self.picture = take(self._proc, processes, monotonic_ns())
            for listener in self.listeners:
                listener(self.picture)
        except Exception:  # noqa: BLE001  # a thread's exception would be seen by nobody
            self.failures += 1
            _log.exception("looking at MPS failed")


def take(proc: Procfs, processes: tuple[ProcessId, ...], at_ns: int) -> Picture:
    """Looks at everything now."""
    return Picture(at_ns, tuple(_place(daemon, proc, processes) for daemon in daemons(proc)))


def _place(daemon: Daemon, proc: Procfs, processes: tuple[ProcessId, ...]) -> Place:
    if daemon.contested:
        return Place(daemon, f"MPS is left alone: {daemon.doubt}")
    try:
        control = connect(daemon, PATIENCE_SECONDS)
        clients, scopes = control.clients(), control.scopes()
        connected = tuple(_connected(clients, daemon, proc, processes))
        return Place(
            daemon,
            None,
            control,
            control.servers(),
            clients,
            scopes,
            tuple(control.devices().items()),
            tuple(control.device_clients().items()),
            tuple((process, _reached(process, control, scopes, proc)) for process in processes),
            connected,
        )
    except MpsError as error:
        return Place(daemon, str(error))


def _connected(
    clients: tuple[Client, ...], daemon: Daemon, proc: Procfs, processes: tuple[ProcessId, ...]
) -> Iterable[tuple[ProcessId, Client]]:
    by_tgid = {client.tgid: client for client in clients}
    for process in processes:
        try:
            tgid = seen_as(process, daemon, proc)
        except (GoneError, SetupError):
            continue
        if tgid in by_tgid:
            yield process, by_tgid[tgid]


def _reached(process: ProcessId, control: Control, scopes: tuple[Scope, ...], proc: Procfs) -> frozenset[Scope]:
    try:
        if control.protocol == 2:
            return frozenset(scopes) if reaches(process, control.daemon, proc) else frozenset()
        return frozenset(scope for scope in scopes if _in_namespace(process, control.daemon, scope, proc))
    except (GoneError, SetupError):
        return frozenset()


def _in_namespace(process: ProcessId, daemon: Daemon, scope: Scope, proc: Procfs) -> bool:
    own = [f"/{scope.server}/{scope.space}"]
    if scope.space == "default":
        own += [f"/{scope.server}", ""]
    return any(reaches(process, daemon, proc, below) for below in own)
