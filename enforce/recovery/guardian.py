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

import errno
import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agent import layout, logs
from agent.clock import monotonic_ns
from agent.errors import GoneError, WardenError
from agent.libbpf import Library, Map, RingBuffer
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.checkpoint.running import check_identity
from enforce.memory.waiting import Hold, Waiting, kernel_room
from enforce.release import keep_releasing, release_all
from enforce.resumer import Due, Resumer
from enforce.undoer import QUICK, SLOW, Undoer
from enforce.undoing import STOPS

_log = logging.getLogger("gpuwarden.guardian")
LEASE_NS = 200_000_000
ROUND_NS = 50_000_000  # longest sleep: a quarter of the lease
STALE_HEARTBEAT_NS = 1_000_000_000
FOREIGN_PASS_NS = 1_000_000_000  # of launches that whoever sends SIGCONT in our place has free
PRUNE_NS = 5_000_000_000
_NO_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # the last two: the number is a thread's now
_LEDGER_SECONDS = 30.0  # a killed agent's files are closed one by one, its many probes among them
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KEEP_RELEASING_SECONDS = 600.0  # a saved process comes back when its device has room; then the next start's turn
_LAST_ROUNDS_NS = 20_000_000  # a launch that passed the lease check just before it ended may still stop


@dataclass(frozen=True, slots=True)
class Settings:
    """What the agent hands over on the command line: file descriptors by map name, times, how to log."""

    fds: dict[str, int]
    ledger: str
    agent_tgid: int
    open_delay_ns: int
    hold_ns: int
    log_format: str = logs.Format.TEXT

    def to_argument(self) -> str:
        """As one word of the command line."""
        return json.dumps(asdict(self))


class Handles:
    """pidfds by process, so that a signal can never reach a process that took over the pid."""

    def __init__(self, proc: Procfs) -> None:
        self._proc = proc
        self._fds: dict[ProcessId, int] = {}

    def get(self, process: ProcessId) -> int | None:
        """None when the process is gone. Raises OSError or SetupError when that cannot be told now."""
        if process not in self._fds:
            try:
                self._fds[process] = self._opened(process)
            except GoneError:
                return None
        return self._fds[process]

    def _opened(self, process: ProcessId) -> int:
        try:
            handle = os.pidfd_open(process.tgid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                raise GoneError(f"process {process.tgid} has ended") from error
            raise
        try:
            check_identity(process, self._proc)  # the pid may have passed to another process before we opened it
        except BaseException:
            os.close(handle)
            raise
        return handle

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

    def drop_all(self) -> None:
        """Closes every handle: they only save time, and may be all the descriptors that we may have."""
        for process in list(self._fds):
            self.drop(process)

    def drop(self, process: ProcessId) -> None:
        """Closes the handle."""
        handle = self._fds.pop(process, None)
        if handle is not None:
            os.close(handle)


def resume_process(handles: Handles, process: ProcessId) -> bool:
    """SIGCONT through a pidfd; False when the process is gone. Raises OSError or SetupError: try again later."""
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
        self._failures = 0
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
                self._end_stop(due)
        for hold in self._waiting.due(now):
            self._resumer.stops.pop(hold.process, None)  # it goes on from whatever else it was stopped for
            self._end_hold(hold)
        if now >= self._prune_ns:
            self._prune_ns = now + PRUNE_NS
            for process in self._handles.prune():
                self._resumer.forget(process)
                self._waiting.forget(process)

    def _resume_all(self) -> None:
        self._ring.consume()
        stops, holds = list(self._resumer.stops.values()), self._waiting.holds
        self._resumer.stops, self._waiting.holds = {}, []
        for stop in stops:
            self._end_stop(Due(stop, 0))
        for hold in holds:
            self._end_hold(hold)

    def _end_stop(self, due: Due) -> None:
        """Or the next round does."""
        if not self._resume(due.stop.process, due.stop.at_ns, due.pass_ns):
            self._resumer.put_back(due, self._clock() + ROUND_NS)

    def _end_hold(self, hold: Hold) -> None:
        """Or one of the next rounds does."""
        if not self._resume(hold.process, hold.at_ns):
            self._waiting.holds.append(hold)

    def _resume(self, process: ProcessId, stopped_at_ns: int, pass_ns: int = 0) -> bool:
        """False when it may still be stopped. One that cannot be resumed keeps no other stopped."""
        record = self._record(process)
        if pass_ns:
            record.passes += 1
            record.pass_ns = pass_ns
        record.stopped_at_ns = 0
        record.paused_ns += max(0, self._clock() - stopped_at_ns)
        record.resumes += 1
        try:
            if resume_process(self._handles, process):
                self._write(process, record)
        except (OSError, WardenError) as error:
            self._handles.drop_all()
            self._count(f"process {process.tgid} cannot be resumed now", error)
            return False
        return True

    def _record(self, process: ProcessId) -> layout.Resume:
        found: layout.Resume | None = self._resumes.get(layout.ProcessKey.of(process))
        return found or layout.Resume()

    def _write(self, process: ProcessId, record: layout.Resume) -> None:
        """For the figures, and a pass: without it the process only has less."""
        try:
            self._resumes.put(layout.ProcessKey.of(process), record)
        except OSError as error:
            self._count(f"what became of process {process.tgid} cannot be written", error)

    def _count(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # the first, second, fourth, … time
            _log.warning("%s (%d failures so far): %s", what, self._failures, error)

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
        self._waiting.add(held)
        process = held.process.id()
        record = self._record(process)
        record.stopped_at_ns = held.at_ns
        self._write(process, record)

    def _stopped(self, pause: layout.Pause) -> None:
        process = pause.process.id()
        foreign = self._resumer.add(pause)  # it launched though we had not resumed it: whoever did is not fought
        self._waiting.ran(process, pause.at_ns)
        record = self._record(process)
        record.stopped_at_ns = self._resumer.stops[process].at_ns
        if foreign:
            if not record.foreign:
                _log.warning("process %d was resumed by somebody else: it goes on for a while", process.tgid)
            record.foreign += 1
            record.passes += 1
            record.pass_ns = FOREIGN_PASS_NS
        self._write(process, record)

    def _sleep_seconds(self) -> float:
        now = self._clock()
        dues = [due for due in (self._resumer.next_ns(now), self._waiting.next_ns(now)) if due is not None]
        return max(0, min(ROUND_NS, *(due - now for due in dues)) if dues else ROUND_NS) / 1e9


def main() -> None:
    """`python -m enforce.guardian SETTINGS`: started by the agent, never by hand."""
    settings = Settings(**json.loads(sys.argv[1]))
    logs.configure(logs.Format(settings.log_format))
    guardian = Guardian(settings)
    for number in _ENDING:
        signal.signal(number, lambda *_: guardian.stop())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a resume that waits for a CPU is a longer pause
    except PermissionError:
        _log.info("no CAP_SYS_NICE: resuming may be late under load")
    guardian.run()


if __name__ == "__main__":
    main()
