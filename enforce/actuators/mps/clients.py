# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which processes are MPS clients, and ending one without harm to the others.

A client that is killed with work outstanding can hang the others, so "I do not know" is an error here, never a no.
"""

from __future__ import annotations

import fcntl
import os
import re
from dataclasses import dataclass

from agent.errors import GoneError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.mps.channel import PATIENCE_SECONDS
from enforce.mps.control import connect
from enforce.mps.daemons import MOST_DAEMONS, claimants, serves
from enforce.mps.model import Client, Control, Daemon, MpsError

_NSPID = re.compile(r"^NSpid:\s*(.+)$", re.MULTILINE)
_NS_GET_PARENT = 0xB702  # <linux/nsfs.h>


@dataclass(frozen=True, slots=True)
class Found:
    """A process as a client, and the daemon that knows it."""

    process: ProcessId
    control: Control
    client: Client


def find_client(process: ProcessId, proc: Procfs, patience_seconds: float = PATIENCE_SECONDS) -> Found | None:
    """None: it is no MPS client. MpsError when a daemon cannot be asked, GoneError when the process has ended."""
    all_of_them = claimants(proc)
    found, asked = None, 0
    unknown = MpsError(all_of_them.unread) if all_of_them.unread else None
    for daemon in all_of_them.daemons:
        try:
            if found is None and serves(daemon, process, proc):
                asked += 1
                _require_answerable(daemon, asked)
                found = _client_of(process, daemon, proc, patience_seconds)
        except MpsError as error:
            unknown = unknown or error
    if not proc.is_alive(process):
        raise GoneError(f"process {process.tgid} has ended")
    if found is None and unknown is not None:
        raise unknown
    return found


def _require_answerable(daemon: Daemon, asked: int) -> None:
    if daemon.contested:
        raise MpsError(daemon.doubt)
    if asked > MOST_DAEMONS:
        raise MpsError(
            f"more than {MOST_DAEMONS} processes say that they are its MPS control daemon: end the false ones"
        )


def _client_of(process: ProcessId, daemon: Daemon, proc: Procfs, patience_seconds: float) -> Found | None:
    tgid = seen_as(process, daemon, proc)
    if tgid is None:
        return None
    control = connect(daemon, patience_seconds)
    client = next((client for client in control.clients() if client.tgid == tgid), None)
    return None if client is None else Found(process, control, client)


def is_mps_client(process: ProcessId, proc: Procfs, patience_seconds: float = PATIENCE_SECONDS) -> bool:
    """See `find_client`; it may take the patience for each daemon. Not for the deciding thread."""
    return find_client(process, proc, patience_seconds) is not None


def terminate_client(found: Found, proc: Procfs) -> None:
    """Takes the device from it. MpsError when the daemon refuses, GoneError when the process has ended meanwhile."""
    if not proc.is_alive(found.process):
        raise GoneError(f"process {found.process.tgid} has ended")
    found.control.terminate(found.client)


def seen_as(process: ProcessId, daemon: Daemon, proc: Procfs) -> int | None:
    """The process's pid in the daemon's PID namespace; None: it is in none that the daemon sees."""
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
        """Takes the device from a client; False: it is none. MpsError: nobody knows, so it may be one."""
        found = find_client(process, self.proc)
        if found is None:
            return False
        terminate_client(found, self.proc)
        return True
