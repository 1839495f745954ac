# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What cannot be done now is done later, and keeps nobody else stopped."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from agent.layout import PAUSE_HELD, PAUSE_QUEUE, PAUSE_STOPPED, RULE_PACE, SLOTS, Gate, Held, Pause, ProcessKey, Rule
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce import guardian
from enforce.guardian import Guardian, Handles
from enforce.memory.waiting import Waiting
from enforce.resumer import Resumer

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
    made._resumes, made._ring, made._handles, made._failures = Full(), Ring(), Handles(Procfs()), 0
    made._resumer = Resumer([Gate() for _ in range(SLOTS)], 20 * MS, 0)
    made._waiting = Waiting(lambda _group, _slot: 0)
    monkeypatch.setattr(guardian, "resume_process", lambda _handles, _process: True)
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
    assert set(it._resumer.stops) == {ProcessId(7, 1)}
    assert it._waiting.keeps(ProcessId(8, 1))
    assert it._failures == 2


def test_one_that_cannot_be_resumed_keeps_no_other_stopped_and_is_tried_again(
    it: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[int] = []
    lacking = {7, 10}

    def resume(_handles: Handles, process: ProcessId) -> bool:
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
    assert not it._waiting.keeps(ProcessId(7, 1))
    assert set(it._resumer.stops) == {ProcessId(7, 1)}


def me() -> ProcessId:
    return Procfs().process_id(os.getpid())


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_handle_that_cannot_be_had_now_is_not_that_of_a_process_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, lack: int
) -> None:
    def refuse(_tgid: int) -> int:
        raise OSError(lack, os.strerror(lack))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match=os.strerror(lack)):
        Handles(Procfs()).get(me())


@pytest.mark.parametrize("why", [errno.ESRCH, errno.EINVAL, errno.ENOENT])
def test_a_pid_that_is_no_process_is_gone(monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    def refuse(_tgid: int) -> int:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert Handles(Procfs()).get(me()) is None


def test_a_process_that_took_over_the_pid_is_not_handled(tmp_path: Path) -> None:
    assert Handles(Procfs()).get(ProcessId(os.getpid(), me().start_ticks - 1)) is None
    assert Handles(Procfs(str(tmp_path))).get(me()) is None


def test_closed_handles_are_opened_again() -> None:
    handles = Handles(Procfs())
    assert handles.get(me()) is not None
    handles.drop_all()
    assert handles.get(me()) is not None
    handles.drop_all()
