# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undoing beside the guardian's work: each act by one undoer, and the quick ones wait for none of the slow ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from agent.clock import monotonic_ns
from agent.model import ContainerKey
from agent.procfs import Procfs
from enforce import undoing
from enforce.entries import Entry
from enforce.ledger import Ledger, read
from enforce.outcome import Outcome
from enforce.undoer import QUICK, SLOW, Undoer
from enforce.undoing import STOPS, UNDO

DEADLINE_SECONDS = 30.0


def test_a_freeze_is_undone_while_something_slow_is_still_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room, begun, undone = tmp_path / "ledger", threading.Event(), threading.Event(), list[str]()

    def slow(entry: Entry, _proc: Procfs) -> Outcome:
        begun.set()
        assert room.wait(DEADLINE_SECONDS)
        undone.append(entry.act)
        return Outcome.RESUMED

    def quick(entry: Entry, _proc: Procfs) -> Outcome:
        undone.append(entry.act)
        return Outcome.RESUMED

    monkeypatch.setitem(undoing.UNDO, "swap", slow)
    monkeypatch.setitem(undoing.UNDO, "freeze", quick)
    ledger = Ledger(path)
    ledger.intend(Entry.at("swap", "/a", ContainerKey("c:a"), 0))
    swapping, thawing = Undoer(path, monotonic_ns, SLOW), Undoer(path, monotonic_ns, QUICK)
    swapping.start()
    assert begun.wait(DEADLINE_SECONDS)
    ledger.intend(Entry.at("freeze", "/b", ContainerKey("c:b"), 0))
    swapping.start()  # it is at it
    thawing.start()
    thawing.wait()
    assert undone == ["freeze"]
    room.set()
    swapping.wait()
    assert undone == ["freeze", "swap"]
    assert {entry.act for entry in read(path)} == {"freeze", "swap"}


def test_every_act_is_undone_by_one_of_them_but_for_what_the_guardian_resumes() -> None:
    assert UNDO.keys() == QUICK | SLOW | STOPS
    assert not QUICK & SLOW
    assert not (QUICK | SLOW) & STOPS
