# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`evict`: the container's GPU processes are asked to end, and ended if they do not.

As an MPS client a process first loses the device through the daemon, and is never killed: one that is killed with work
outstanding can take all clients of its server along. Nothing waits here: `apply` is called again until all have ended,
so that the agent's own end is never held up by a grace period.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import GoneError, WardenError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.checkpoint.running import check_identity
from enforce.entries import Entry
from enforce.model import Subject
from enforce.rungs import UnfinishedError

_log = logging.getLogger(__name__)
FORGET_NS: Final = 60 * NS_PER_SECOND  # not looked at for so long: the next time is another eviction
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)


class EvictError(WardenError):
    """A process did not end; the message says what to do."""


class MpsClients(Protocol):
    """The MPS daemons of this machine, as far as evicting needs them."""

    def terminate(self, process: ProcessId) -> bool:
        """Takes the device from a client; False: it is none. WardenError: nobody knows, so it may be one."""
        ...


@dataclass(slots=True)
class _Asked:
    """A process on its way out."""

    at_ns: int  # of the SIGTERM
    seen_ns: int
    may_be_killed: bool
    why_not: str = ""


class Evict:
    """Owns who was asked to end, and when. One container is evicted by one thread at a time."""

    name = "evict"

    def __init__(self, proc: Procfs, mps: MpsClients, clock: Callable[[], int] = monotonic_ns) -> None:
        self._proc, self._mps, self._clock = proc, mps, clock
        self._asked: dict[ProcessId, _Asked] = {}
        self.asked_to_end = self.killed = 0

    def obstacle(self, subject: Subject) -> str | None:
        """See `enforce.model.Rung`."""
        return None if subject.processes else "it has no process on a GPU"

    def intents(self, subject: Subject) -> Sequence[Entry]:
        """None: what has ended cannot be undone."""
        return ()

    def apply(self, subject: Subject) -> None:
        """One look at each process. UnfinishedError while some still run, EvictError when they will not end."""
        now = self._clock()
        for process in [process for process, asked in list(self._asked.items()) if now - asked.seen_ns > FORGET_NS]:
            self._asked.pop(process, None)
        grace_ns = subject.rule.limits.evict_grace_ns
        left = [process for process in subject.processes if self._goes_on(process, grace_ns, now)]
        stubborn = [process for process in left if not self._asked[process].may_be_killed]
        overdue = [process for process in stubborn if now - self._asked[process].at_ns >= grace_ns]
        if overdue:
            raise EvictError(
                f"process {overdue[0].tgid} does not end and is not killed, as {self._asked[overdue[0]].why_not}: "
                "end it by hand"
            )
        if left:
            raise UnfinishedError(f"{len(left)} of its processes have not ended yet")

    def _goes_on(self, process: ProcessId, grace_ns: int, now_ns: int) -> bool:
        """Whether it still runs after what is due now was done to it."""
        try:
            handle = os.pidfd_open(process.tgid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                self._asked.pop(process, None)
                return False
            raise
        try:
            check_identity(process, self._proc)  # of the pid that the handle holds: it cannot be another one's now
            self._proceed(process, handle, grace_ns, now_ns)
        except (GoneError, ProcessLookupError):
            self._asked.pop(process, None)
            return False
        finally:
            os.close(handle)
        return True

    def _proceed(self, process: ProcessId, handle: int, grace_ns: int, now_ns: int) -> None:
        asked = self._asked.get(process)
        if asked is None:
            why_not = self._why_not_kill(process)
            self._asked[process] = _Asked(now_ns, now_ns, not why_not, why_not)
            _log.info("process %d is asked to end", process.tgid)
            self.asked_to_end += 1
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            signal.pidfd_send_signal(handle, signal.SIGCONT)  # stopped at a launch, it could not
            return
        asked.seen_ns = now_ns
        if asked.may_be_killed and now_ns - asked.at_ns >= grace_ns:
            _log.warning("process %d has not ended within %.0f s: killed", process.tgid, grace_ns / NS_PER_SECOND)
            self.killed += 1
            signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _why_not_kill(self, process: ProcessId) -> str:
        """Also takes the device from an MPS client. "": it is none."""
        try:
            return "it is an MPS client" if self._mps.terminate(process) else ""
        except GoneError:
            raise
        except WardenError as error:
            _log.warning("process %d: %s", process.tgid, error)
            return f"it may be an MPS client ({error})"
