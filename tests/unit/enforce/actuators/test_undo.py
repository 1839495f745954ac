# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The table of acts, and undoing beside the guardian's work: quick acts wait for none of the slow ones."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.clock import monotonic_ns
from agent.core.model import ContainerKey
from agent.node.procfs import Procfs
from enforce.actuators.undo import UNDO, BackgroundUndo, MadeBy, UndoFunction, acts_where, release_all
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, read

DEADLINE_SECONDS = 30.0


def test_a_freeze_is_undone_while_something_slow_is_still_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room, begun, undone = tmp_path / "ledger", threading.Event(), threading.Event(), list[str]()

    def slow(entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        begun.set()
        assert room.wait(DEADLINE_SECONDS)
        undone.append(entry.act)
        return UndoOutcome.RESUMED

    def quick(entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        undone.append(entry.act)
        return UndoOutcome.RESUMED

    functions: dict[str, UndoFunction] = {"swap": slow, "freeze": quick}
    for act, function in functions.items():
        monkeypatch.setitem(UNDO, act, replace(UNDO[act], undo=function))
    ledger = Ledger(path)
    ledger.intend(LedgerEntry.at("swap", "/a", ContainerKey("c:a"), 0))
    swapping = BackgroundUndo(path, monotonic_ns, acts_where(MadeBy.AGENT, quick=False))
    thawing = BackgroundUndo(path, monotonic_ns, acts_where(MadeBy.AGENT, quick=True))
    swapping.start()
    assert begun.wait(DEADLINE_SECONDS)
    ledger.intend(LedgerEntry.at("freeze", "/b", ContainerKey("c:b"), 0))
    swapping.start()  # it is at it
    thawing.start()
    thawing.wait()
    assert undone == ["freeze"]
    room.set()
    swapping.wait()
    assert undone == ["freeze", "swap"]
    assert {entry.act for entry in read(path)} == {"freeze", "swap"}


def test_the_guardian_resumes_what_the_kernel_stopped_and_undoes_the_rest_in_two_threads() -> None:
    assert acts_where(MadeBy.KERNEL) == {"pace", "hold"}
    assert acts_where(MadeBy.AGENT, quick=True) == {"freeze"}
    assert acts_where(MadeBy.AGENT, quick=False) == {"lock", "swap", "mps"}
    assert acts_where() == UNDO.keys()


def test_what_thaws_comes_before_what_resumes_and_both_before_what_needs_the_process_to_run() -> None:
    order = list(UNDO)
    assert order.index("freeze") < min(order.index(act) for act in acts_where(MadeBy.KERNEL))
    assert max(order.index(act) for act in acts_where(quick=True)) < min(order.index(act) for act in ("lock", "swap"))


def test_an_act_that_this_version_does_not_know_stays_in_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    Ledger(path).intend(LedgerEntry.at("levitate", "/a", ContainerKey("c:a"), 0))
    [result] = release_all(path)
    assert not result.closed
    assert "newer" in (result.error or "")
    assert [entry.act for entry in read(path)] == ["levitate"]
