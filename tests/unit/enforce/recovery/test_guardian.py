# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What cannot be done now is done later, and keeps no other process stopped."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from agent.core.model import ProcessId
from agent.node.pidfd import PidfdCache
from agent.node.procfs import Procfs
from agent.probes.abi import (
    PAUSE_HELD,
    PAUSE_QUEUE,
    PAUSE_STOPPED,
    RULE_PACE,
    SLOTS,
    Gate,
    Held,
    Pause,
    ProcessKey,
    Rule,
)
from enforce.actuators.launch.resume import ResumeSchedule
from enforce.memory.allocation_queue import AllocationQueue
from enforce.recovery import guardian
from enforce.recovery.guardian import Guardian

MS = 1_000_000


class Ring:
    """Nothing comes."""

    def consume(self) -> int:
        return 0


class Full:
    """A map that takes nothing more."""

    def get(self, _key: object) -> None:
        return None

    def put(self, _key: object, _value: object) -> None:
        raise OSError(errno.E2BIG, "full")


@pytest.fixture
def it(monkeypatch: pytest.MonkeyPatch) -> Guardian:
    """A guardian of no kernel, to which every process is known."""
    made: Any = object.__new__(Guardian)
    made._clock = lambda: 1000 * MS
    made._resumes, made._ring, made._pidfds, made._failures = Full(), Ring(), PidfdCache(Procfs()), 0
    made._schedule = ResumeSchedule([Gate() for _ in range(SLOTS)], 20 * MS, 0)
    made._allocations = AllocationQueue(lambda _group, _slot: 0)
    monkeypatch.setattr(guardian, "resume_process", lambda _pidfds, _process: True)
    found: Guardian = made
    return found


def stop(it: Guardian, tgid: int, at: int = 1000) -> None:
    rule = Rule(flags=RULE_PACE, rate_ppm=1, max_queued_ns=MS, max_pause_ns=3600_000 * MS)
    it._receive(bytes(Pause(PAUSE_STOPPED, PAUSE_QUEUE, ProcessKey(tgid, 1), 0, 0, at * MS, 9 * MS, MS, 0, rule)))


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
