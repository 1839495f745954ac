# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The lock on a run directory: one enforcing agent has it, and its guardian until that has undone everything.

It is a lock on a file of the directory, which the guardian inherits: it is released with the last of the two, however
they end. So what a living agent holds is not undone, and a new agent's holds never meet an old guardian's last release.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agent.config.trusted_file import exposed_path
from agent.core.errors import SetupError
from agent.core.model import ProcessId
from agent.node.procfs import Procfs

_log = logging.getLogger(__name__)
FILE: Final = "enforcing.lock"
TIMEOUT_SECONDS: Final = 60.0  # a guardian waits 30 s for the ledger; a killed agent's probes are closed one by one
_POLL_SECONDS = 0.02
_MAX_BYTES = 256
_MAX_FDS = 1 << 15  # more than an agent's probes; the kernel's table of them takes 8 bytes each
_ROOM_FDS = 32


class RunDirLock:
    """Holds the lock until closed. `fd` is for the guardian to inherit."""

    def __init__(self, run_dir: Path, fd: int) -> None:
        self.run_dir, self.fd = run_dir, fd

    @classmethod
    def take(cls, run_dir: Path, proc: Procfs, timeout_seconds: float = TIMEOUT_SECONDS) -> RunDirLock:
        """Waits for the guardian of a dead agent to finish. SetupError while another agent enforces."""
        fd = _opened(run_dir)
        try:
            _wait(fd, run_dir, proc, timeout_seconds)
            me = ProcessId(os.getpid(), proc.stat(os.getpid()).start_ticks)
            os.ftruncate(fd, 0)
            with suppress(OSError):  # the lock is what counts; its holder is for messages, and the disk may be full
                os.pwrite(fd, json.dumps({"tgid": me.tgid, "start_ticks": me.start_ticks}).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(run_dir, closed_first(fd))

    def close(self) -> None:
        """Releases it; a guardian that still runs keeps it."""
        os.close(self.fd)


def enforcing_elsewhere(run_dir: Path, proc: Procfs) -> int | None:
    """The pid of a living agent that enforces with this run directory; None when there is none."""
    try:
        fd = os.open(run_dir / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _holder(fd, proc) if not _locked(fd, fcntl.LOCK_SH) else None
    finally:
        os.close(fd)


def closed_first(fd: int) -> int:
    """The same under a high number: of a process that is killed the kernel closes those first.

    It closes an agent's probes one by one, which takes seconds, and a lock or pipe between them is held as long. The
    order is that of exit_task_work(): last in, first out. Without room up there it stays.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = min(soft, _MAX_FDS) - _ROOM_FDS
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    except (OSError, OverflowError):
        return fd
    os.close(fd)
    return moved


@contextmanager
def hold_if_unused(run_dir: Path) -> Iterator[bool]:
    """Whether neither an agent nor a guardian has the directory. Then it is held: an agent that starts waits."""
    fd = _opened(run_dir)
    try:
        yield _locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _opened(run_dir: Path) -> int:
    path = run_dir / FILE
    try:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        exposed = exposed_path(path)
        if exposed is not None:  # the ledger lies beside it: what is in force could not be undone
            raise SetupError(f"{path} {exposed}, or choose another --run-dir")
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SetupError(f"cannot lock {path} ({error.strerror}): run as root, or choose another --run-dir") from error


def _wait(fd: int, run_dir: Path, proc: Procfs, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    began, reported = clock(), False
    while not _locked(fd, fcntl.LOCK_EX):
        holder = _holder(fd, proc)
        if holder is not None:
            raise SetupError(
                f"another agent (process {holder}) already enforces with {run_dir}: stop it first, "
                "or choose another --run-dir"
            )
        if clock() - began >= seconds:
            raise SetupError(
                f"the guardian of an agent that is gone still holds {run_dir / FILE}: "
                "look for a hanging `enforce.recovery.guardian` process and end it"
            )
        if not reported:
            reported = True
            _log.warning("waiting until the guardian of an agent that is gone has undone everything")
        time.sleep(_POLL_SECONDS)


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int, proc: Procfs) -> int | None:
    """The agent that wrote its identity into the file, if it lives."""
    with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError):
        written = json.loads(os.pread(fd, _MAX_BYTES, 0))
        process = ProcessId(int(written["tgid"]), int(written["start_ticks"]))
        if process.tgid != os.getpid() and proc.is_alive(process):
            return process.tgid
    return None
