# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo a stop: SIGCONT to the very process that the ledger names, if it is stopped and nobody debugs it.

The pidfd is opened first, then the start time is read, so the process that was checked is the one that is signalled.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agent.errors import GoneError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.outcome import Outcome

_STOPPED, _TRACED = "T", "t"
_PENDING = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)
_UNREADABLE = (FileNotFoundError, ProcessLookupError, PermissionError)
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)
_START_TICKS = 0xFFFFFFFF  # the probes carry 32 bits of it; they wrap after 497 days


def resume(entry: Entry, procfs: Procfs) -> Outcome:
    """Raises GoneError, ProcessLookupError or another OSError."""
    return _resume(entry.process, procfs) if entry.process is not None else Outcome.GONE


def _resume(process: ProcessId, procfs: Procfs) -> Outcome:
    with _pidfd(process.tgid) as pidfd:
        found = procfs.stat(process.tgid)
        if found.dead or (found.start_ticks - process.start_ticks) & _START_TICKS:
            return Outcome.GONE
        stopping = _stop_is_pending(process.tgid, procfs)  # first: what is pending now may have been delivered below
        states = set(_thread_states(process.tgid, procfs))
        if _TRACED in states:
            return Outcome.TRACED
        if _STOPPED not in states and not stopping:
            return Outcome.RUNNING
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        return Outcome.RESUMED


@contextmanager
def _pidfd(tgid: int) -> Iterator[int]:
    pidfd = os.pidfd_open(tgid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _thread_states(tgid: int, procfs: Procfs) -> Iterator[str]:
    """Of all threads: the first may have ended (Z) or wait for a disk (D) while the process is stopped."""
    threads = Procfs(f"{procfs.root}/{tgid}/task")
    for tid in _threads(threads):
        with suppress(GoneError):
            yield threads.stat(tid).state


def _stop_is_pending(tgid: int, procfs: Procfs) -> bool:
    """Whether it was told to stop and has not yet: it was about to run, or waits for a disk."""
    threads = f"{procfs.root}/{tgid}/task"
    for tid in _threads(Procfs(threads)):
        with suppress(*_UNREADABLE), open(f"{threads}/{tid}/status", encoding="utf-8", errors="replace") as file:
            if any(int(mask, 16) & _SIGSTOP_BIT for mask in _PENDING.findall(file.read(1 << 16))):
                return True
    return False


def _threads(threads: Procfs) -> list[int]:
    try:
        return list(threads.tgids())
    except FileNotFoundError:
        return []
