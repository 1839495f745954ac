# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo what the ledger says was done. Used by `gpuwarden release`, by the next start and by the guardian.

Touches only what is in the ledger, and only if it is that very process: the pidfd is opened first, then the start time
is read, so the process that was checked is the one that is signalled. One that cannot be undone does not keep the
others waiting.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from agent.errors import GoneError, WardenError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce import ledger
from enforce.entries import Entry

_AGAIN_SECONDS = 0.02
_STOPPED, _TRACED = "T", "t"
_PENDING = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)
_NO_PROCESS = (errno.EINVAL, errno.ENOENT)  # pidfd_open, older and newer kernels: the number is a thread's now
_START_TICKS = 0xFFFFFFFF  # the probes carry 32 bits of it; they wrap after 497 days


class Outcome(StrEnum):
    """What became of one entry."""

    RESUMED = "resumed"
    RUNNING = "running"  # it was not stopped; there was nothing to undo
    GONE = "gone"  # the process has ended, or its pid is another's now
    TRACED = "traced"  # a debugger holds it: left alone, the entry stays
    FAILED = "failed"  # see `error`; the entry stays


@dataclass(frozen=True, slots=True)
class Released:
    """One entry of the ledger, and what was done about it."""

    entry: Entry
    outcome: Outcome
    error: str | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self.outcome in (Outcome.RESUMED, Outcome.RUNNING, Outcome.GONE)


def release_all(
    ledger_path: str | os.PathLike[str], proc_root: str = "/proc", patience_seconds: float = 0.0
) -> list[Released]:
    """Resume every process that the ledger has outstanding, and close its entry. Never raises for one of them.

    `patience_seconds`: how long to wait, when all run, for a dying agent to let go of the ledger.
    """
    entries = ledger.read(ledger_path)  # needs neither the lock nor space on the disk: resuming comes first
    boot = ledger.this_boot()
    released = [_released(entry, boot, Procfs(proc_root)) for entry in entries]
    if any(one.closed for one in released):
        with suppress(WardenError):  # what stays open is looked at again next time, and found running
            book = _open(ledger_path, patience_seconds)
            for one in released:
                if one.closed:
                    book.done(one.entry.id)
            book.close()
    return released


def _open(ledger_path: str | os.PathLike[str], patience_seconds: float) -> ledger.Ledger:
    ends = time.monotonic() + patience_seconds
    while True:
        try:
            return ledger.Ledger(ledger_path)
        except WardenError:
            if time.monotonic() >= ends:
                raise
            time.sleep(_AGAIN_SECONDS)


def _released(entry: Entry, boot: str, procfs: Procfs) -> Released:
    if entry.boot and boot and entry.boot != boot:
        return Released(entry, Outcome.GONE)
    try:
        return Released(entry, _resume(entry.process, procfs))
    except (GoneError, ProcessLookupError):
        return Released(entry, Outcome.GONE)
    except (OSError, WardenError) as error:
        if isinstance(error, OSError) and error.errno in _NO_PROCESS:
            return Released(entry, Outcome.GONE)
        return Released(entry, Outcome.FAILED, str(error))


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
        with suppress(OSError), open(f"{threads}/{tid}/status", encoding="utf-8", errors="replace") as file:
            if any(int(mask, 16) & _SIGSTOP_BIT for mask in _PENDING.findall(file.read(1 << 16))):
                return True
    return False


def _threads(threads: Procfs) -> list[int]:
    try:
        return list(threads.tgids())
    except FileNotFoundError:
        return []
