# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What cannot be done now is done later, and keeps no other process stopped."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from agent.core.model import ContainerKey, ProcessId
from agent.node.pidfd import PidfdCache
from agent.node.procfs import Procfs
from agent.probes.abi import (
    LINKS,
    PAUSE_COPY,
    PAUSE_FREE,
    PAUSE_HELD,
    PAUSE_LINK_FREE,
    PAUSE_QUEUE,
    PAUSE_STOPPED,
    PAUSE_TURN,
    RULE_INHERITED,
    RULE_PACE,
    SLOTS,
    Control,
    Gate,
    Held,
    Link,
    Pause,
    ProcessKey,
    Resume,
    Rule,
    Turn,
    Wake,
)
from enforce.actuators.launch.resume import ResumeSchedule
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger, LedgerError, read
from enforce.memory.allocation_queue import AllocationQueue
from enforce.recovery import guardian
from enforce.recovery.backstop import Beats
from enforce.recovery.guardian import Guardian, InheritedStops

MS = 1_000_000


class Ring:
    """Nothing comes."""

    def consume(self, most: int | None = None) -> None:
        pass


class Stops:
    """The kernel's map of stopped processes."""

    def __init__(self) -> None:
        self.of: dict[ProcessId, Pause] = {}

    def get(self, key: ProcessKey) -> Pause | None:
        return self.of.get(key.id())

    def take(self, key: ProcessKey) -> Pause | None:
        return self.of.pop(key.id(), None)

    def delete(self, key: ProcessKey) -> bool:
        return self.take(key) is not None

    def items(self) -> list[tuple[ProcessKey, Pause]]:
        return [(ProcessKey.of(process), pause) for process, pause in self.of.items()]


class Full:
    """A map that takes nothing more."""

    def get(self, _key: object) -> None:
        return None

    def put(self, _key: object, _value: object) -> None:
        raise OSError(errno.E2BIG, "full")


@pytest.fixture
def it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Guardian:
    """A guardian of no kernel, to which every process is known."""
    made: Any = object.__new__(Guardian)
    made._clock = lambda: 1000 * MS
    made._resumes, made._ring, made._pidfds, made._failures = Full(), Ring(), PidfdCache(Procfs()), 0
    made._beats, made._releases = Beats(), 0
    made._stops, made._holding, made._gates = Stops(), Stops(), [Gate() for _ in range(SLOTS)]
    made._links = [Link() for _ in range(LINKS)]
    made._control, made._wakes_lost, made._prune_ns = Control(heartbeat_ns=1000 * MS), 0, 1 << 62
    turns = [Turn() for _ in range(SLOTS)]
    made._inherited = InheritedStops(str(tmp_path / "ledger"), lambda: made._clock(), made._count)
    made._schedule = ResumeSchedule(made._gates, 20 * MS, 0, made._links, turns=turns)
    made._allocations = AllocationQueue(lambda _group, _slot: 0)
    monkeypatch.setattr(guardian, "resume_process", lambda _pidfds, _process: True)
    found: Guardian = made
    return found


def stops_of(it: Guardian) -> dict[ProcessId, Pause]:
    stops: Any = it._stops
    found: dict[ProcessId, Pause] = stops.of
    return found


def stop(it: Guardian, tgid: int, at: int = 1000, *, reported: bool = True) -> None:
    rule = Rule(flags=RULE_PACE, rate_ppm=1, max_queued_ns=MS, max_pause_ns=3600_000 * MS)
    stops_of(it)[ProcessId(tgid, 1)] = Pause(
        kind=PAUSE_STOPPED,
        reason=PAUSE_QUEUE,
        process=ProcessKey(tgid, 1),
        at_ns=at * MS,
        queued_ns=9 * MS,
        estimate_ns=MS,
        rule=rule,
    )
    if reported:
        it._receive(bytes(Wake(PAUSE_STOPPED, 0, ProcessKey(tgid, 1))))


def hold(it: Guardian, tgid: int, at: int = 1000) -> None:
    it._receive(bytes(Held(PAUSE_HELD, 1, ProcessKey(tgid, 1), 0, 0, at * MS, 1, 3600_000 * MS)))


def test_a_stop_and_a_hold_are_known_even_if_their_figures_cannot_be_written(it: Guardian) -> None:
    stop(it, 7)
    hold(it, 8)
    assert set(it._schedule.stops) == {ProcessId(7, 1)}
    assert it._allocations.keeps(ProcessId(8, 1))
    assert it._failures == 2


def test_one_that_cannot_be_resumed_keeps_no_other_stopped_and_is_tried_again(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []
    lacking = {7, 10}

    def resume(_pidfds: PidfdCache, process: ProcessId) -> bool:
        if process.tgid in lacking:
            raise OSError(errno.ENFILE, "too many open files")
        resumed.append(process.tgid)
        return True

    monkeypatch.setattr(guardian, "resume_process", resume)
    for tgid in (7, 8, 9):
        stop(it, tgid)
    for tgid in (10, 11):
        hold(it, tgid)
    it._resume_all()
    assert resumed == [8, 9, 11]
    lacking.clear()
    it._resume_all()
    assert sorted(resumed) == [7, 8, 9, 10, 11]


def test_a_process_that_launches_is_held_at_no_earlier_allocation(it: Guardian) -> None:
    hold(it, 7, at=1000)
    stop(it, 7, at=1100)
    assert not it._allocations.keeps(ProcessId(7, 1))
    assert set(it._schedule.stops) == {ProcessId(7, 1)}


def test_what_the_backstop_resumed_meanwhile_is_not_taken_for_another_writers_resume(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []

    def resume(_pidfds: PidfdCache, process: ProcessId) -> bool:
        resumed.append(process.tgid)
        return True

    monkeypatch.setattr(guardian, "resume_process", resume)
    stop(it, 7, at=1000)
    it._round()
    assert (resumed, it._beats.guardian_ns) == ([], 1000 * MS)
    it._beats.releases = 1
    it._round()
    assert resumed == [7]
    assert it._control.lease_until_ns == 0  # the backstop is still at it: it would resume what is stopped now
    it._beats.releases = 2
    it._round()
    assert it._control.lease_until_ns > it._clock()
    assert not it._schedule.stops
    stop(it, 7, at=2000)
    it._round()
    assert set(it._schedule.stops) == {ProcessId(7, 1)}
    assert resumed == [7]


def test_a_guardian_that_stood_still_while_it_resumed_does_not_renew_the_lease_of_what_the_backstop_resumed(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_ns = 3600_900 * MS  # of the longest pause

    def resume(_pidfds: PidfdCache, _process: ProcessId) -> bool:
        it._clock = lambda: ends_ns + 1000 * MS
        it._beats.releases = 2
        return True

    monkeypatch.setattr(guardian, "resume_process", resume)
    for tgid in (7, 8):
        stop(it, tgid, at=900)
    it._clock = lambda: ends_ns
    it._control.heartbeat_ns = ends_ns
    it._round()
    assert not it._schedule.stops
    assert it._control.lease_until_ns == ends_ns + guardian.LEASE_NS


def test_the_lease_is_renewed_before_anything_that_tenants_caused_is_read(it: Guardian) -> None:
    leases: list[int] = []

    class Endless(Ring):
        def consume(self, most: int | None = None) -> None:
            assert most is not None  # or four processes keep the round from ending
            leases.append(it._control.lease_until_ns)

    it._ring = Endless()  # type: ignore[assignment]
    it._round()
    assert leases == [1000 * MS + guardian.LEASE_NS]


def test_where_the_ring_was_full_all_stops_are_looked_through_and_gates_and_links_tell_again(it: Guardian) -> None:
    stop(it, 7, reported=False)
    it._gates[3].free_posted = it._links[5].free_posted = 1
    it._round()
    assert it._schedule.stops == {}
    it._control.wakes_lost += 1
    it._round()
    assert set(it._schedule.stops) == {ProcessId(7, 1)}
    assert (it._gates[3].free_posted, it._links[5].free_posted) == (0, 0)


def test_what_another_threads_late_write_says_of_an_entry_does_not_leave_its_process_stopped(it: Guardian) -> None:
    stop(it, 7, reported=False)
    stops_of(it)[ProcessId(7, 1)].process = ProcessKey(9, 1)  # the process that had the place in the map before
    it._receive(bytes(Wake(PAUSE_STOPPED, 0, ProcessKey(7, 1))))
    assert set(it._schedule.stops) == {ProcessId(7, 1)}


def test_a_process_that_is_stopped_under_the_rule_of_its_parent_is_in_the_ledger_until_it_runs(
    it: Guardian, tmp_path: Path
) -> None:
    stop(it, 7, reported=False)
    stops_of(it)[ProcessId(7, 1)].rule.flags |= RULE_INHERITED
    it._receive(bytes(Wake(PAUSE_STOPPED, 0, ProcessKey(7, 1))))
    stop(it, 8)  # the agent's own entry names it
    (entry,) = read(tmp_path / "ledger")
    assert (entry.act, entry.process) == ("pace", ProcessId(7, 1))
    it._resume_all()
    assert read(tmp_path / "ledger") == []


def test_the_agents_own_entry_stays_when_the_process_runs_again(it: Guardian, tmp_path: Path) -> None:
    process = ProcessId(7, 1)
    it._inherited.stopped(process)
    ours = LedgerEntry.of("pace", process, ContainerKey("docker:abc"), 5)
    Ledger(tmp_path / "ledger").intend(ours)
    it._inherited.resumed(process)
    assert [entry.container for entry in read(tmp_path / "ledger")] == ["docker:abc"]


def test_the_agents_own_entry_is_not_replaced(it: Guardian, tmp_path: Path) -> None:
    process = ProcessId(7, 1)
    Ledger(tmp_path / "ledger").intend(LedgerEntry.of("pace", process, ContainerKey("docker:abc"), 5))
    it._inherited.stopped(process)
    it._inherited.resumed(process)
    assert [entry.container for entry in read(tmp_path / "ledger")] == ["docker:abc"]


def test_a_ledger_that_another_process_holds_delays_one_resume_and_not_each(
    it: Guardian, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def refuse(_ledger: Ledger, _entry: LedgerEntry) -> bool:
        tries.append(1)
        raise LedgerError("another gpuwarden holds its lock")

    monkeypatch.setattr(Ledger, "intend_new", refuse)
    for tgid in range(7, 57):
        it._inherited.stopped(ProcessId(tgid, 1))
    assert len(tries) == 1


def test_chains_of_short_lives_do_not_keep_the_guardian_writing(it: Guardian, tmp_path: Path) -> None:
    for tgid in range(7, 57):
        it._inherited.stopped(ProcessId(tgid, 1))
    assert len(read(tmp_path / "ledger")) == 1


def test_a_ledger_that_takes_nothing_keeps_no_process_stopped(it: Guardian, tmp_path: Path) -> None:
    it._inherited = InheritedStops(str(tmp_path), it._clock, it._count)  # a folder
    stop(it, 7, reported=False)
    stops_of(it)[ProcessId(7, 1)].rule.flags |= RULE_INHERITED
    it._receive(bytes(Wake(PAUSE_STOPPED, 0, ProcessKey(7, 1))))
    it._resume_all()
    assert not it._schedule.stops


def test_nothing_is_kept_of_a_process_that_ended_before_it_was_ever_resumed(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guardian, "resume_process", lambda *_: False)
    for tgid in range(7, 17):
        stop(it, tgid)
    assert it._schedule._credits
    it._resume_all()
    assert not it._schedule._credits


def test_a_process_is_taken_out_of_the_stops_before_it_is_resumed(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(guardian, "resume_process", lambda *_: left.append(len(stops_of(it))))
    stop(it, 7)
    it._resume_all()
    assert left == [0]


def test_a_record_of_a_gate_that_opened_lets_the_kernel_write_the_next_one(it: Guardian) -> None:
    it._gates[2].free_posted = 1
    it._receive(bytes(Wake(PAUSE_FREE, 2, ProcessKey())))
    assert it._gates[2].free_posted == 0
    it._links[2].free_posted = 1
    it._receive(bytes(Wake(PAUSE_LINK_FREE, 2, ProcessKey())))
    assert it._links[2].free_posted == 0


@pytest.mark.parametrize(("reason", "at_copies_ns"), [(PAUSE_COPY, 5 * MS), (PAUSE_QUEUE, 0)])
def test_time_stopped_at_a_copy_is_counted_apart(
    it: Guardian, monkeypatch: pytest.MonkeyPatch, reason: int, at_copies_ns: int
) -> None:
    written: list[Resume] = []
    monkeypatch.setattr(it, "_write", lambda _process, record: written.append(record))
    stop(it, 7)
    stops_of(it)[ProcessId(7, 1)].reason = reason
    written.clear()
    monkeypatch.setattr(it, "_clock", lambda: 1005 * MS)
    it._resume(ProcessId(7, 1), 1000 * MS)
    assert [(record.paused_ns, record.copy_paused_ns) for record in written] == [(5 * MS, at_copies_ns)]


def test_a_stop_that_another_process_ended_counts_until_then(it: Guardian) -> None:
    records: Any = it._resumes
    written: list[Any] = []
    records.put = lambda _key, record: written.append(record)
    stop(it, 7, at=900)
    stops_of(it)[ProcessId(7, 1)].ran_ns = 940 * MS
    it._resume_all()
    assert written[-1].paused_ns == 40 * MS


def test_a_process_that_ended_while_it_waited_for_its_turn_keeps_it_from_no_other(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []

    def resume(_pidfds: PidfdCache, process: ProcessId) -> bool:
        resumed.append(process.tgid)
        return True

    monkeypatch.setattr(guardian, "resume_process", resume)
    for tgid in (7, 8):
        rule = Rule(deadline_ns=30 * MS, max_pause_ns=200 * MS)
        process, due_ns = ProcessKey(tgid, 1), (1000 + tgid) * MS
        pause = Pause(kind=PAUSE_STOPPED, reason=PAUSE_TURN, process=process, at_ns=1000 * MS, due_ns=due_ns, rule=rule)
        stops_of(it)[ProcessId(tgid, 1)] = pause
        it._receive(bytes(Wake(PAUSE_STOPPED, 0, process)))
    del stops_of(it)[ProcessId(7, 1)]  # as the kernel does when it ends
    it._round()
    assert not it._schedule.turns[0].owner
    it._round()
    assert resumed == [7, 8]
    assert it._schedule.turns[0].owner == 1 << 32 | 8
