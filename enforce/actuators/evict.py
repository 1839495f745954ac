# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`evict`: the container's GPU processes are asked to end, and killed if they do not.

As an MPS client a process first loses the device through the daemon, is asked to end a little later, and is never
killed: a client that a signal ends with work outstanding takes all clients of its server along (seen with 580.159.04,
with SIGTERM too, and not after `terminate_client`). So one that may be a client gets no signal at all before the daemon
has answered. Nothing waits here: `apply` is called again until all have ended, so that a grace period never delays the
agent's own end.
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
SETTLES_NS: Final = NS_PER_SECOND // 5  # terminate_client takes effect after some 35 ms
STEP_NS: Final = NS_PER_SECOND  # after so long in one call, whether it is still wanted is checked first
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
    """A process that is to end. `kept_because`: why it is not killed; "": it may be."""

    at_ns: int  # since when
    seen_ns: int
    kept_because: str = ""
    ask_at_ns: int | None = None  # when to send the SIGTERM; None: it may be an MPS client
    asked: bool = False


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
        left: list[ProcessId] = []
        for process in sorted(subject.processes, key=self._seen_ns):  # the one that was seen last has its turn last
            if left and self._clock() - now >= STEP_NS:  # MPS takes its time: by now something else may be wanted
                break
            if self._step(process, grace_ns, now):
                left.append(process)
        for process in subject.processes:
            found = self._evictions.get(process)
            if found is not None and found.kept_because and now - found.at_ns >= grace_ns:
                why = f"process {process.tgid} has not ended and is not killed, as {found.kept_because}"
                raise EvictError(f"{why}: end it by hand")
        if left:
            raise UnfinishedError(f"{len(left)} of its processes have not ended yet")

    def _seen_ns(self, process: ProcessId) -> int:
        eviction = self._evictions.get(process)
        return eviction.seen_ns if eviction else 0

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
        eviction = self._evictions.setdefault(process, _Eviction(now_ns, now_ns))
        eviction.seen_ns = now_ns
        if eviction.ask_at_ns is None:
            self._take_device(process, eviction, now_ns)
        if eviction.ask_at_ns is None or now_ns < eviction.ask_at_ns:
            return
        if not eviction.asked:
            _log.info("process %d is asked to end", process.tgid)
            eviction.asked = True
            self.asked_to_end += 1
            pidfd.send(signal.SIGTERM)
            pidfd.send(signal.SIGCONT)  # stopped at a launch, it could not
        elif not eviction.kept_because and now_ns - eviction.at_ns >= grace_ns:
            _log.warning("process %d has not ended within %.0f s: killed", process.tgid, grace_ns / NS_PER_SECOND)
            self.killed += 1
            pidfd.send(signal.SIGKILL)

    def _take_device(self, process: ProcessId, eviction: _Eviction, now_ns: int) -> None:
        """From an MPS client, which is not killed. Says when it can be asked to end, or why it cannot be yet."""
        try:
            if self._mps.terminate(process):
                eviction.ask_at_ns, eviction.kept_because = now_ns + SETTLES_NS, "it is an MPS client"
            else:
                eviction.ask_at_ns, eviction.kept_because = now_ns, ""
        except GoneError:
            raise
        except WardenError as error:
            if not eviction.kept_because:
                _log.warning("process %d is not asked to end yet: %s", process.tgid, error)
            eviction.kept_because = f"it may be an MPS client ({error})"
