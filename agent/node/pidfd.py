# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Acts on a process through a pidfd, so that a process that took over the pid is never reached.

A process is (tgid, start time). The start time is compared after the pidfd is open: from then on a signal through it
reaches that very process or none. An act that takes the number instead, such as a call of the driver, needs `check`
right before it and `has_ended` after it.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from types import TracebackType
from typing import Self

from agent.core.errors import GoneError
from agent.core.model import ProcessId
from agent.node.proc_parse import START_TICKS
from agent.node.procfs import Procfs

_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two, older and newer kernels: it is a thread's now


def check_identity(process: ProcessId, proc: Procfs) -> None:
    """GoneError when the process has ended, be its pid free or another process's now."""
    found = proc.stat(process.tgid)
    if found.dead or (found.start_ticks - process.start_ticks) & START_TICKS:
        raise GoneError(f"process {process.tgid} has ended")


class Pidfd:
    """A pidfd of one process. Close it, or use it in a with statement."""

    def __init__(self, process: ProcessId, proc: Procfs) -> None:
        """GoneError when the process has ended. OSError or SetupError: it may still run, and cannot be reached now."""
        self.process, self._proc = process, proc
        try:
            self.fd = os.pidfd_open(process.tgid)
        except OverflowError as error:  # of a number that is no pid
            raise GoneError(f"there is no process {process.tgid}") from error
        except OSError as error:
            if error.errno in _NO_PROCESS:
                raise GoneError(f"process {process.tgid} has ended") from error
            raise
        try:
            self.check()  # the pid may have passed to another process before it was opened
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """GoneError when the process has ended. OSError or SetupError when that cannot be read now."""
        check_identity(self.process, self._proc)

    def send(self, number: int) -> None:
        """The signal, to this process only. GoneError when it has ended."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError as error:
            raise GoneError(f"process {self.process.tgid} has ended") from error

    def may_signal(self) -> bool:
        """Whether this process may: it has the capability, and no security module forbids it. GoneError."""
        try:
            self.send(0)
        except PermissionError:
            return False
        return True

    def has_ended(self, wait_ms: int = 0) -> bool:
        """Whether the process has ended, reaped or not. `wait_ms`: how long it may still take."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(wait_ms))

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _where: TracebackType | None) -> None:
        self.close()


class PidfdCache:
    """Open pidfds by process, for one that signals the same processes again and again."""

    def __init__(self, proc: Procfs) -> None:
        self._proc = proc
        self._open: dict[ProcessId, Pidfd] = {}

    def get(self, process: ProcessId) -> Pidfd | None:
        """None when the process is gone. Raises OSError or SetupError when it cannot be opened now."""
        if process not in self._open:
            try:
                self._open[process] = Pidfd(process, self._proc)
            except GoneError:
                return None
        return self._open[process]

    def prune(self) -> list[ProcessId]:
        """Closes the pidfds of processes that have ended, and returns these processes."""
        poll = select.poll()
        owners = {pidfd.fd: process for process, pidfd in self._open.items()}
        for fd in owners:
            poll.register(fd, select.POLLIN)
        ended = [owners[fd] for fd, _ in poll.poll(0)]
        for process in ended:
            self.drop(process)
        return ended

    def drop_all(self) -> None:
        """Closes all of them: they only save time, and may be all the descriptors that this process can have."""
        for process in list(self._open):
            self.drop(process)

    def drop(self, process: ProcessId) -> None:
        """Closes one."""
        pidfd = self._open.pop(process, None)
        if pidfd is not None:
            pidfd.close()


def resume_process(pidfds: PidfdCache, process: ProcessId) -> bool:
    """SIGCONT; False when the process is gone. Raises OSError or SetupError: try again later."""
    pidfd = pidfds.get(process)
    if pidfd is None:
        return False
    try:
        pidfd.send(signal.SIGCONT)
    except GoneError:
        pidfds.drop(process)
        return False
    return True
