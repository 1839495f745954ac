# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which processes are MPS clients, and ending one without harm to the others.

A client that is killed with work outstanding can hang the others, so not to know whether a process is a client is an
error, never a no.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass

from agent.core.errors import GoneError
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.mps.channel import TIMEOUT_SECONDS
from enforce.actuators.mps.daemons import MAX_DAEMONS, daemon_candidates, serves
from enforce.actuators.mps.model import Daemon, MpsClient, MpsControl, MpsError
from enforce.actuators.mps.protocol3 import connect

_NSPID = re.compile(r"^NSpid:\s*(.+)$", re.MULTILINE)
_NS_GET_PARENT = 0xB702  # <linux/nsfs.h>


@dataclass(frozen=True, slots=True)
class FoundClient:
    """A process as a client, and the daemon that knows it."""

    process: ProcessId
    control: MpsControl
    client: MpsClient


def find_client(process: ProcessId, proc: Procfs, timeout_seconds: float = TIMEOUT_SECONDS) -> FoundClient | None:
    """None: it is no MPS client. MpsError when a daemon cannot be asked, GoneError when the process has ended."""
    candidates = daemon_candidates(proc)
    found, asked = None, 0
    unknown = MpsError(candidates.unread) if candidates.unread else None
    for daemon in candidates.daemons:
        try:
            if found is None and serves(daemon, process, proc):
                asked += 1
                _require_answerable(daemon, asked)
                found = _client_of(process, daemon, proc, timeout_seconds)
        except MpsError as error:
            unknown = unknown or error
    if not proc.is_alive(process):
        raise GoneError(f"process {process.tgid} has ended")
    if found is None and unknown is not None:
        raise unknown
    return found


def _require_answerable(daemon: Daemon, asked: int) -> None:
    if daemon.contested:
        raise MpsError(daemon.contested_error)
    if asked > MAX_DAEMONS:
        raise MpsError(f"more than {MAX_DAEMONS} processes claim to be its MPS control daemon: end the false ones")


def _client_of(process: ProcessId, daemon: Daemon, proc: Procfs, timeout_seconds: float) -> FoundClient | None:
    tgid = seen_as(process, daemon, proc)
    if tgid is None:
        return None
    control = connect(daemon, timeout_seconds)
    client = next((client for client in control.clients() if client.tgid == tgid), None)
    return None if client is None else FoundClient(process, control, client)


def is_mps_client(process: ProcessId, proc: Procfs, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """See `find_client`; it may take the time-out for each daemon. Not for the deciding thread."""
    return find_client(process, proc, timeout_seconds) is not None


def terminate_client(found: FoundClient, proc: Procfs) -> None:
    """Takes the device from it. MpsError when the daemon refuses, GoneError when the process has ended meanwhile."""
    if not proc.is_alive(found.process):
        raise GoneError(f"process {found.process.tgid} has ended")
    found.control.terminate(found.client)


def seen_as(process: ProcessId, daemon: Daemon, proc: Procfs) -> int | None:
    """The process's pid in the daemon's PID namespace; None: in none that the daemon sees."""
    try:
        return _seen_as(process, os.stat(f"{proc.root}/{daemon.process.tgid}/ns/pid").st_ino, proc)
    except FileNotFoundError as error:
        raise GoneError(f"process {process.tgid} or the MPS daemon has ended") from error
    except OSError as error:
        raise MpsError(f"cannot tell which PIDs the MPS daemon {daemon.process.tgid} sees: run as root") from error


def _seen_as(process: ProcessId, namespace: int, proc: Procfs) -> int | None:
    """Walks up from the process's own PID namespace; `NSpid` lists its pids from this one's namespace down."""
    status = _NSPID.search(proc.status(process.tgid))
    pids = [int(word) for word in status[1].split()] if status else [process.tgid]
    descriptor = os.open(f"{proc.root}/{process.tgid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while pids:
            if os.fstat(descriptor).st_ino == namespace:
                return pids[-1]
            pids.pop()
            if pids:
                parent = fcntl.ioctl(descriptor, _NS_GET_PARENT)
                os.close(descriptor)
                descriptor = parent
    finally:
        os.close(descriptor)
    return None


@dataclass(frozen=True, slots=True)
class AllClients:
    """The clients of all daemons of this machine, as evicting needs them."""

    proc: Procfs

    def terminate(self, process: ProcessId) -> bool:
        """Takes the device from a client; False: it is none. MpsError: unknown, so it may be one."""
        found = find_client(process, self.proc)
        if found is None:
            return False
        terminate_client(found, self.proc)
        return True
