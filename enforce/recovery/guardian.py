# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The guardian: the process that resumes what the kernel stopped, and releases everything when the agent is gone.

It is a process of its own because resuming must not wait for the agent's work, and must outlive it. The kernel stops no
process beyond the lease that is renewed here, in each round, only while the agent's heartbeat is fresh. When the agent
dies, the kernel ends the lease at once and reports it, and everything is resumed here; when the agent hangs, the same
after a second; when the guardian dies, the lease runs out and the agent resumes everything; when both die or stand
still, the backstop does.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agent.core import logs
from agent.core.clock import monotonic_ns, wall_ns
from agent.core.errors import WardenError
from agent.core.model import ContainerKey, ProcessId
from agent.node.pidfd import PidfdCache, resume_process
from agent.node.procfs import Procfs, this_boot
from agent.probes import abi
from agent.probes.libbpf import Library, Map, RingBuffer
from enforce.actuators.launch.resume import DueResume, ResumeSchedule
from enforce.actuators.undo import BackgroundUndo, MadeBy, acts_where, keep_releasing, release_all
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger
from enforce.memory.allocation_queue import AllocationQueue, HeldAllocation, kernel_room
from enforce.recovery.backstop import Beats

_log = logging.getLogger("gpuwarden.guardian")
LEASE_NS = 200_000_000
ROUND_NS = 50_000_000  # longest sleep: a quarter of the lease
STALE_HEARTBEAT_NS = 1_000_000_000
MOST_RECORDS = 64  # that are read in one round: a process can have the kernel write one for each of its resumes
PRUNE_NS = 5_000_000_000
_LEDGER_SECONDS = 30.0  # a killed agent's files are closed one by one, its many probes among them
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_KEEP_RELEASING_SECONDS = 600.0  # a saved process comes back when its device has room; then the next start's turn
NOTES_NS, NOTES_AGAIN_NS = 10_000_000, 5_000_000_000
_LAST_ROUNDS_NS = 20_000_000  # a launch that passed the lease check just before it ended may still stop


@dataclass(frozen=True, slots=True)
class GuardianSettings:
    """What the agent hands over on the command line: file descriptors by map name, times, how to log."""

    fds: dict[str, int]
    ledger: str
    agent_tgid: int
    open_delay_ns: int
    hold_ns: int
    beats: int  # the descriptor of their page
    log_format: str = logs.Format.TEXT

    def to_argument(self) -> str:
        """As one word of the command line."""
        return json.dumps(asdict(self))


class InheritedStops:
    """Entries of processes that are stopped under the rule of the one that forked them: the agent has none of them.

    Without one, a child whose agent and guardian die in the moment before it gets a rule of its own would stay stopped.
    Chains of short lives can make many such: of those that come within NOTES_NS of another one none is written.
    """

    def __init__(self, path: str, clock: Callable[[], int], report: Callable[[str, Exception], object]) -> None:
        self._path, self._clock, self._report = path, clock, report
        self._ledger: Ledger | None = None  # opened with the first
        self._entries: dict[ProcessId, LedgerEntry] = {}
        self._next_ns = 0

    def stopped(self, process: ProcessId) -> None:
        """What cannot be written is reported."""
        if process in self._entries or self._clock() < self._next_ns:
            return
        entry = replace(LedgerEntry.of("pace", process, ContainerKey(""), wall_ns()), boot=this_boot())
        try:
            self._ledger = self._ledger or Ledger(self._path)
            if self._ledger.intend_new(entry):  # or the agent's own entry is there by now
                self._entries[process] = entry
            self._next_ns = self._clock() + NOTES_NS
        except WardenError as error:  # another process may hold the ledger: resuming must not wait for that
            self._report(f"no entry in the ledger names process {process.tgid}, which is stopped", error)
            self._next_ns = self._clock() + NOTES_AGAIN_NS

    def resumed(self, process: ProcessId) -> None:
        """What cannot be written is reported: the entry stays, and undoing it again does no harm."""
        entry = self._entries.pop(process, None)
        if entry is None or self._ledger is None:
            return
        try:
            self._ledger.done_if_same([entry])  # the agent may have written its own one since
        except WardenError as error:
            self._report(f"the entry of process {process.tgid}, which runs, stays in the ledger", error)


class Guardian:
    """The loop. It has the kernel's maps as file descriptors from the agent.

    One field more than usual: what the kernel shares, what waits, and what undoes are all needed in each round.
    """

    def __init__(self, settings: GuardianSettings, clock: Callable[[], int] = monotonic_ns) -> None:
        library = Library()
        maps = {name: Map(library, fd, *abi.MAPS.get(name, (abi.U32, abi.U32))) for name, fd in settings.fds.items()}
        self._settings, self._clock = settings, clock
        self._control = maps["controls"].share(1)[0]
        self._beats = Beats.shared(settings.beats)
        self._releases = self._beats.releases & ~1
        self._gates = list(maps["gates"].share(abi.SLOTS))  # an array makes an object of each element that is looked at
        self._links = list(maps["links"].share(abi.LINKS))
        self._resumes, self._stops, self._holding = maps["resumes"], maps["stops"], maps["holding"]
        self._wakes_lost = -1  # what an earlier guardian left is looked through at once
        turns = list(maps["turns"].share(abi.SLOTS))
        for turn in turns:
            turn.waiting = 0  # an earlier guardian's; what waits now is in `stops`
        times = (settings.hold_ns, settings.open_delay_ns)
        self._schedule = ResumeSchedule(self._gates, *times, self._links, turns=turns)
        self._allocations = AllocationQueue(kernel_room(maps["quotas"], maps["quota_uses"], maps["memory"]))
        self._ring = RingBuffer(library, settings.fds["pauses"], self._receive)
        self._pidfds = PidfdCache(Procfs())
        # What the kernel stopped is resumed in the rounds: resumed twice, it would look like another writer's resume.
        quick, slow = (acts_where(MadeBy.AGENT, quick) for quick in (True, False))
        self._undos = [BackgroundUndo(Path(settings.ledger), clock, acts) for acts in (quick, slow)]
        self._inherited = InheritedStops(settings.ledger, clock, self._count)
        self._agent = os.pidfd_open(settings.agent_tgid)
        self._finished = False
        self._failures = 0
        self._prune_ns = 0

    def run(self) -> None:
        """Until the agent ends or `stop` is called; then everything is released."""
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
        """Ends the lease, resumes what is stopped, undoes what is in the ledger; twice, as an act may come late."""
        self._control.lease_until_ns = 0
        for background_undo in self._undos:
            background_undo.start()
        until = self._clock() + _LAST_ROUNDS_NS
        while True:
            self._resume_all()
            if self._clock() >= until:
                break
            select.select([self._ring.epoll_fd], [], [], _LAST_ROUNDS_NS / 4e9)
        ledger = Path(self._settings.ledger)
        quick, slow = self._undos
        quick.wait()
        release_all(ledger, acts=acts_where(quick=True))  # a late act, too, must not wait for what is slow
        slow.wait()
        released = release_all(ledger, patience_seconds=_LEDGER_SECONDS)
        if select.select([self._agent], [], [], 0)[0]:  # there is no agent that would retry
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)
            keep_releasing(ledger, released, _KEEP_RELEASING_SECONDS)

    def _round(self) -> None:
        self._beats.guardian_ns = self._clock()
        if (releases := self._beats.releases) != self._releases:
            self._control.lease_until_ns = 0
            self._resume_all()  # the backstop has: another stop is none of a process that another writer resumed
            if releases & 1:
                return
            self._releases = releases
        now = self._clock()
        if now - self._control.heartbeat_ns > STALE_HEARTBEAT_NS:
            self._control.lease_until_ns = 0
            for background_undo in self._undos:
                background_undo.start_if_due()
            self._resume_all()
            return
        self._renew_lease()  # first: nothing that is read below may keep it waiting
        self._ring.consume(MOST_RECORDS)
        self._look_through_stops()
        now = self._clock()
        for due in self._schedule.due(now):
            self._renew_lease()
            if not self._allocations.keeps(due.stop.process):  # a wait for memory does not end with the longest pause
                self._end_stop(due)
        for hold in self._allocations.due(now):
            self._schedule.stops.pop(hold.process, None)  # it is resumed, whatever else it was stopped for
            self._end_hold(hold)
        if now >= self._prune_ns:
            self._prune_ns = now + PRUNE_NS
            for process in self._pidfds.prune():
                self._schedule.forget(process)
                self._allocations.forget(process)
                self._forget_stop(process)
                self._inherited.resumed(process)

    def _renew_lease(self) -> None:
        """Not while the backstop resumes what is held, nor before that is forgotten here."""
        now = self._clock()  # first: of one that stands still at any place after it, the lease is over when it goes on
        if self._beats.releases == self._releases:
            self._control.lease_until_ns = now + LEASE_NS

    def _look_through_stops(self) -> None:
        """Where the ring was full, a stop's own record is missing; the stop is not."""
        if self._wakes_lost == self._control.wakes_lost:
            return
        self._wakes_lost = self._control.wakes_lost
        for gate in self._gates:
            gate.free_posted = 0
        for link in self._links:
            link.free_posted = 0
        for key, pause in self._stops.items():
            if pause.kind == abi.PAUSE_STOPPED and key.id() not in self._schedule.stops:
                self._on_stopped(key, pause)

    def _resume_all(self) -> None:
        self._ring.consume()  # the lease is over: few come meanwhile
        self._wakes_lost = -1
        self._look_through_stops()
        stops, holds = list(self._schedule.stops.values()), self._allocations.holds
        self._schedule.stops, self._allocations.holds = {}, []
        for stop in stops:
            self._end_stop(DueResume(stop, 0))
        for hold in holds:
            self._end_hold(hold)

    def _end_stop(self, due: DueResume) -> None:
        """Resumes it, or leaves it to the next round."""
        if due.stop.deadline is not None and self._stops.get(abi.ProcessKey.of(due.stop.process)) is None:
            self._schedule.end_turn(due.stop.process)  # the kernel forgets the stop of a process that ends
        if not self._resume(due.stop.process, due.stop.at_ns, due.pass_ns):
            self._schedule.put_back(due, self._clock() + ROUND_NS)

    def _end_hold(self, hold: HeldAllocation) -> None:
        """Resumes it, or leaves it to one of the next rounds."""
        if not self._resume(hold.process, hold.at_ns):
            self._allocations.holds.append(hold)

    def _resume(self, process: ProcessId, stopped_at_ns: int, pass_ns: int = 0) -> bool:
        """False when it may still be stopped. A process that cannot be resumed does not keep others stopped."""
        pause = self._forget_stop(process)  # first: what stops it from now on is reported again
        ended_ns = pause.ran_ns if pause is not None and pause.ran_ns else self._clock()
        record = self._record(process) if pass_ns else None
        if record is not None:
            record.passes += 1
            record.pass_ns = pass_ns
            self._write(process, record)  # before it launches again
        try:
            if resume_process(self._pidfds, process):
                record = record or self._record(process)
                record.stopped_at_ns = 0
                paused_ns = max(0, ended_ns - stopped_at_ns)
                record.paused_ns += paused_ns
                if pause is not None and pause.reason == abi.PAUSE_COPY:
                    record.copy_paused_ns += paused_ns
                record.resumes += 1
                self._write(process, record)
            else:  # it ended before it ever ran again: no pidfd is there that would say so later
                self._schedule.forget(process)
        except (OSError, WardenError) as error:
            self._pidfds.drop_all()
            self._count(f"process {process.tgid} cannot be resumed now", error)
            return False
        self._inherited.resumed(process)
        return True

    def _forget_stop(self, process: ProcessId) -> abi.Pause | None:
        key = abi.ProcessKey.of(process)
        self._holding.delete(key)
        found: abi.Pause | None = self._stops.take(key)
        return found

    def _record(self, process: ProcessId) -> abi.Resume:
        found: abi.Resume | None = self._resumes.get(abi.ProcessKey.of(process))
        return found or abi.Resume()

    def _write(self, process: ProcessId, record: abi.Resume) -> None:
        """For the figures, and for a pass: without it the process only gets less."""
        try:
            self._resumes.put(abi.ProcessKey.of(process), record)
        except OSError as error:
            self._count(f"the resume record of process {process.tgid} cannot be written", error)

    def _count(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # the first, second, fourth, … time
            _log.warning("%s (%d failures so far): %s", what, self._failures, error)

    def _receive(self, record: bytes) -> None:
        if abi.U32.from_buffer_copy(record).value == abi.PAUSE_HELD:
            self._on_held(abi.Held.from_buffer_copy(record))
            return
        wake = abi.Wake.from_buffer_copy(record)
        if wake.kind == abi.PAUSE_STOPPED:
            pause = self._stops.get(wake.process)
            if pause is not None:  # or it was resumed already
                self._on_stopped(wake.process, pause)
        elif wake.kind == abi.PAUSE_FREE:
            self._gates[wake.slot].free_posted = 0
        elif wake.kind == abi.PAUSE_LINK_FREE:
            self._links[wake.slot].free_posted = 0
        elif wake.kind == abi.PAUSE_AGENT_EXIT:
            self._finished = True

    def _on_held(self, held: abi.Held) -> None:
        self._allocations.add(held)
        process = held.process.id()
        record = self._record(process)
        record.stopped_at_ns = held.at_ns
        self._write(process, record)

    def _on_stopped(self, key: abi.ProcessKey, pause: abi.Pause) -> None:
        """By the key: a thread of a process that was there before may have written into the entry since."""
        pause.process = key
        process = key.id()
        self._schedule.add(pause)
        self._allocations.ran(process, pause.at_ns)
        record = self._record(process)
        record.stopped_at_ns = pause.at_ns
        self._write(process, record)
        if pause.rule.flags & abi.RULE_INHERITED:
            self._inherited.stopped(process)

    def _sleep_seconds(self) -> float:
        now = self._clock()
        dues = [due for due in (self._schedule.next_ns(now), self._allocations.next_ns(now)) if due is not None]
        return max(0, min(ROUND_NS, *(due - now for due in dues)) if dues else ROUND_NS) / 1e9


def main() -> None:
    """`python -m enforce.recovery.guardian SETTINGS`: started by the agent, never by hand."""
    settings = GuardianSettings(**json.loads(sys.argv[1]))
    logs.configure(logs.Format(settings.log_format))
    guardian = Guardian(settings)
    for number in _ENDING:
        signal.signal(number, lambda *_: guardian.stop())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a resume that waits for a CPU is a longer pause
    except PermissionError:
        _log.info("no CAP_SYS_NICE: resuming may be late under load")
    with suppress(OSError):  # its session is a group of its own to the scheduler, whose niceness is another one
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")
    guardian.run()


if __name__ == "__main__":
    main()
