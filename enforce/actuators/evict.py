# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`evict`: the container's GPU processes are asked to end, and killed if they do not.

As an MPS client a process first loses the device through the daemon, and is never killed: a client that is killed with
work outstanding can take all clients of its server along. Nothing waits here: `apply` is called again until all have
ended, so that a grace period never delays the agent's own end.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, WardenError
from agent.core.model import ProcessId
from agent.node.pidfd import Pidfd
from agent.node.procfs import Procfs
from enforce.actuators.ladder import UnfinishedError
from enforce.ledger.entries import LedgerEntry
from enforce.model import Subject

_log = logging.getLogger(__name__)
FORGET_NS: Final = 60 * NS_PER_SECOND  # not applied for so long: the next time is another eviction


class EvictError(WardenError):
    """A process did not end; the message says what to do."""


class MpsClients(Protocol):
    """The MPS daemons of this machine, as far as evicting needs them."""

    def terminate(self, process: ProcessId) -> bool:
        """Takes the device from a client; False: it is no client. WardenError: unknown, so it may be one."""
        ...


@dataclass(slots=True)
class _Eviction:
    """A process that was asked to end."""

    at_ns: int  # of the SIGTERM
    seen_ns: int
    may_be_killed: bool
    kept_because: str = ""


class Evict:
    """Owns which processes were asked to end, and when. One container is evicted by one thread at a time."""

    name = "evict"

    def __init__(self, proc: Procfs, mps: MpsClients, clock: Callable[[], int] = monotonic_ns) -> None:
        self._proc, self._mps, self._clock = proc, mps, clock
        self._evictions: dict[ProcessId, _Eviction] = {}
        self.asked_to_end = self.killed = 0

    def obstacle(self, subject: Subject) -> str | None:
        """See `enforce.model.Rung`."""
        return None if subject.processes else "it has no process on a GPU"

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """None: what has ended cannot be undone."""
        return ()

    def apply(self, subject: Subject) -> None:
        """One step for each process. UnfinishedError while some run, EvictError when one will not end by itself."""
        now = self._clock()
        for process, eviction in list(self._evictions.items()):
            if now - eviction.seen_ns > FORGET_NS:
                self._evictions.pop(process, None)
        grace_ns = subject.rule.limits.evict_grace_ns
        left = [process for process in subject.processes if self._step(process, grace_ns, now)]
        stubborn = [process for process in left if not self._evictions[process].may_be_killed]
        overdue = [process for process in stubborn if now - self._evictions[process].at_ns >= grace_ns]
        if overdue:
            tgid, reason = overdue[0].tgid, self._evictions[overdue[0]].kept_because
            raise EvictError(f"process {tgid} does not end and is not killed, as {reason}: end it by hand")
        if left:
            raise UnfinishedError(f"{len(left)} of its processes have not ended yet")

    def _step(self, process: ProcessId, grace_ns: int, now_ns: int) -> bool:
        """Does what is due now; whether the process still runs."""
        try:
            with Pidfd(process, self._proc) as pidfd:
                self._proceed(pidfd, grace_ns, now_ns)
        except GoneError:
            self._evictions.pop(process, None)
            return False
        return True

    def _proceed(self, pidfd: Pidfd, grace_ns: int, now_ns: int) -> None:
        process = pidfd.process
        eviction = self._evictions.get(process)
        if eviction is None:
            reason = self._reason_not_to_kill(process)
            self._evictions[process] = _Eviction(now_ns, now_ns, not reason, reason)
            _log.info("process %d is asked to end", process.tgid)
            self.asked_to_end += 1
            pidfd.send(signal.SIGTERM)
            pidfd.send(signal.SIGCONT)  # stopped at a launch, it could not
            return
        eviction.seen_ns = now_ns
        if eviction.may_be_killed and now_ns - eviction.at_ns >= grace_ns:
            _log.warning("process %d has not ended within %.0f s: killed", process.tgid, grace_ns / NS_PER_SECOND)
            self.killed += 1
            pidfd.send(signal.SIGKILL)

    def _reason_not_to_kill(self, process: ProcessId) -> str:
        """Takes the device from an MPS client, which is not killed. "": it is no client."""
        try:
            return "it is an MPS client" if self._mps.terminate(process) else ""
        except GoneError:
            raise
        except WardenError as error:
            _log.warning("process %d: %s", process.tgid, error)
            return f"it may be an MPS client ({error})"
