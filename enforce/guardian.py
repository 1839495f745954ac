# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The guardian: the process that resumes what the kernel stopped, and releases everything when the agent is gone.

It is a process of its own because resuming must not wait for the agent's work, and must outlive it. The kernel stops
nobody beyond the lease that is renewed here, in each round, only while the agent's heartbeat is fresh. So: the agent
dies → the kernel ends the lease at once and says so, and everything is resumed here; the agent hangs → the same, after
a second; the guardian dies → the lease runs out and the agent resumes everything; both die → `gpuwarden release`, the
unit's ExecStopPost or the next start reads the ledger.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agent import layout
from agent.clock import monotonic_ns
from agent.libbpf import Library, Map, RingBuffer
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.memory.waiting import Waiting, kernel_room
from enforce.release import keep_releasing, release_all
from enforce.resumer import Resumer
from enforce.undoer import QUICK, SLOW, Undoer
from enforce.undoing import STOPS

_log = logging.getLogger("gpuwarden.guardian")
LEASE_NS = 200_000_000
ROUND_NS = 50_000_000  # longest sleep: a quarter of the lease
STALE_HEARTBEAT_NS = 1_000_000_000
FOREIGN_PASS_NS = 1_000_000_000  # of launches that whoever sends SIGCONT in our place has free
PRUNE_NS = 5_000_000_000
_LEDGER_SECONDS = 30.0  # a killed agent's files are closed one by one, its many probes among them
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KEEP_RELEASING_SECONDS = 600.0  # a saved process comes back when its device has room; then the next start's turn
_LAST_ROUNDS_NS = 20_000_000  # a launch that passed the lease check just before it ended may still stop


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent hands over on the command line: file descriptors by map name, and times."""

    fds: dict[str, int]
    ledger: str
    agent_tgid: int
    open_delay_ns: int
    hold_ns: int

    def to_argument(self) -> str:
        """As one word of the command line."""
        return json.dumps(asdict(self))


class Handles:
    """pidfds by process, so that a signal can never reach a process that took over the pid."""

    def __init__(self, proc: Procfs) -> None:
        self._proc = proc
        self._fds: dict[ProcessId, int] = {}

    def get(self, process: ProcessId) -> int | None:
        """None when the process is gone."""
        if process not in self._fds:
            try:
                handle = os.pidfd_open(process.tgid)
            except OSError:
                return None
            if not self._proc.is_alive(process):  # the pid may have passed to another process before we opened it
                os.close(handle)
                return None
            self._fds[process] = handle
        return self._fds[process]

    def prune(self) -> list[ProcessId]:
        """Closes the handles of processes that have ended, and says which."""
        poll = select.poll()
        owners = {handle: process for process, handle in self._fds.items()}
        for handle in owners:
            poll.register(handle, select.POLLIN)
        ended = [owners[handle] for handle, _ in poll.poll(0)]
        for process in ended:
            self.drop(process)
        return ended

    def drop(self, process: ProcessId) -> None:
        """Closes the handle."""
        handle = self._fds.pop(process, None)
        if handle is not None:
            os.close(handle)


def resume_process(handles: Handles, process: ProcessId) -> bool:
    """SIGCONT through a pidfd; False when the process is gone."""
    handle = handles.get(process)
    if handle is None:
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    except ProcessLookupError:
        handles.drop(process)
        return False
    return True


class Guardian:
    """The loop. Everything that it needs from the kernel side it was given as file descriptors."""

    def __init__(self, settings: Settings, clock: Callable[[], int] = monotonic_ns) -> None:
        library = Library()
        maps = {
            name: Map(library, fd, *layout.MAPS.get(name, (layout.U32, layout.U32)))
            for name, fd in settings.fds.items()
        }
        self._settings, self._clock = settings, clock
        self._control = maps["controls"].share(1)[0]
        self._resumes = maps["resumes"]
        self._resumer = Resumer(maps["gates"].share(layout.SLOTS), settings.hold_ns, settings.open_delay_ns)
        self._waiting = Waiting(kernel_room(maps["quotas"], maps["quota_uses"], maps["memory"]))
        self._ring = RingBuffer(library, settings.fds["pauses"], self._receive)
        self._handles = Handles(Procfs())
        self._undoers = [Undoer(Path(settings.ledger), clock, acts) for acts in (QUICK, SLOW)]
        self._agent = os.pidfd_open(settings.agent_tgid)
        self._finished = False
        self._prune_ns = 0

    def run(self) -> None:
        """Until the agent ends or says so; then everything is released."""
        self._control.guardian_tgid = os.getpid()
        self._control.hold_ns = self._settings.hold_ns
        watched = [self._ring.epoll_fd, self._agent, sys.stdin.fileno()]
        while not self._finished:
            self._round()
            ready, _, _ = select.select(watched, [], [], self._sleep_seconds())
            if self._agent in ready or sys.stdin.fileno() in ready:
                break
        self.release_everything()

    def stop(self) -> None:
        """Ends the loop after this round."""
        self._finished = True

    def release_everything(self) -> None:
        """Ends the lease, resumes whoever is stopped, undoes what the ledger says; twice: an act may come late."""
        self._control.lease_until_ns = 0
        for undoer in self._undoers:
            undoer.start()
        until = self._clock() + _LAST_ROUNDS_NS
        while True:
            self._resume_all()
            if self._clock() >= until:
                break
            select.select([self._ring.epoll_fd], [], [], _LAST_ROUNDS_NS / 4e9)
        ledger = Path(self._settings.ledger)
        quick, slow = self._undoers
        quick.wait()
        release_all(ledger, acts=QUICK | STOPS)  # a late act, too, must not wait for what is slow
        slow.wait()
        released = release_all(ledger, patience_seconds=_LEDGER_SECONDS)
        if select.select([self._agent], [], [], 0)[0]:  # nobody else is there to try again
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)
            keep_releasing(ledger, released, _KEEP_RELEASING_SECONDS)

    def _round(self) -> None:
        self._ring.consume()
        now = self._clock()
        if now - self._control.heartbeat_ns > STALE_HEARTBEAT_NS:
            self._control.lease_until_ns = 0
            for undoer in self._undoers:
                undoer.start_if_due()
            self._resume_all()
            return
        self._control.lease_until_ns = now + LEASE_NS
        for due in self._resumer.due(now):
            if not self._waiting.keeps(
                due.stop.process
            ):  # it also waits for memory: its longest pause does not end that
                self._resume(due.stop.process, due.stop.at_ns, due.pass_ns)
        for hold in self._waiting.due(now):
            self._resumer.stops.pop(hold.process, None)  # it goes on from whatever else it was stopped for
            self._resume(hold.process, hold.at_ns)
        if now >= self._prune_ns:
            self._prune_ns = now + PRUNE_NS
            for process in self._handles.prune():
                self._resumer.forget(process)
                self._waiting.forget(process)

    def _resume_all(self) -> None:
        self._ring.consume()
        for stop in self._resumer.stops.values():
            self._resume(stop.process, stop.at_ns)
        for hold in self._waiting.holds:
            self._resume(hold.process, hold.at_ns)
        self._resumer.stops.clear()
        self._waiting.holds.clear()

    def _resume(self, process: ProcessId, stopped_at_ns: int, pass_ns: int = 0) -> None:
        key = layout.ProcessKey.of(process)
        record = self._resumes.get(key) or layout.Resume()
        if pass_ns:
            record.passes += 1
            record.pass_ns = pass_ns
        record.stopped_at_ns = 0
        record.paused_ns += max(0, self._clock() - stopped_at_ns)
        record.resumes += 1
        if resume_process(self._handles, process):
            self._resumes.put(key, record)

    def _receive(self, record: bytes) -> None:
        if layout.U32.from_buffer_copy(record).value == layout.PAUSE_HELD:
            self._held(layout.Held.from_buffer_copy(record))
            return
        pause = layout.Pause.from_buffer_copy(record)
        if pause.kind == layout.PAUSE_STOPPED:
            self._stopped(pause)
        elif pause.kind == layout.PAUSE_AGENT_EXIT:
            self._finished = True

    def _held(self, held: layout.Held) -> None:
        record = self._resumes.get(held.process) or layout.Resume()
        record.stopped_at_ns = held.at_ns
        self._resumes.put(held.process, record)
        self._waiting.add(held)

    def _stopped(self, pause: layout.Pause) -> None:
        record = self._resumes.get(pause.process) or layout.Resume()
        record.stopped_at_ns = pause.at_ns
        if self._resumer.add(pause):  # it launched though we had not resumed it: whoever did is not fought
            if not record.foreign:
                _log.warning("process %d was resumed by somebody else: it goes on for a while", pause.process.tgid)
            record.foreign += 1
            record.passes += 1
            record.pass_ns = FOREIGN_PASS_NS
        self._resumes.put(pause.process, record)

    def _sleep_seconds(self) -> float:
        now = self._clock()
        dues = [due for due in (self._resumer.next_ns(now), self._waiting.next_ns(now)) if due is not None]
        return max(0, min(ROUND_NS, *(due - now for due in dues)) if dues else ROUND_NS) / 1e9


def main() -> None:
    """`python -m enforce.guardian SETTINGS`: started by the agent, never by hand."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    guardian = Guardian(Settings(**json.loads(sys.argv[1])))
    for number in _ENDING:
        signal.signal(number, lambda *_: guardian.stop())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a resume that waits for a CPU is a longer pause
    except PermissionError:
        _log.info("no CAP_SYS_NICE: resuming may be late under load")
    guardian.run()


if __name__ == "__main__":
    main()
