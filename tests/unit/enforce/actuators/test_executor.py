# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rungs: the ledger first, one thing at a time, undone as after a crash, and reported when it cannot be done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from agent.core.errors import WardenError
from agent.core.model import Container, ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.executor import AGAIN_NS, RETRY_NS, UNFINISHED_NS, RungExecutor, Wanted
from enforce.actuators.ladder import UnfinishedError
from enforce.actuators.undo import UNDO, ActUndo, MadeBy
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import Subject
from tests.support.clocks import SetClock
from tools.harness.wait import until

KEY = ContainerKey("docker:abc")
SUBJECT: Any = Subject(Container(KEY, "training", "docker"), (), frozenset(), rule=None)  # type: ignore[arg-type]
DEADLINE_SECONDS = 30.0


class Chalk:
    """A rung that leaves a mark; what it does is what the test sets."""

    name = "chalk"

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.applied_with: list[str] = []
        self.undone: list[str] = []
        self.applied = 0
        self.obstacle_now: str | None = None
        self.error: Exception | None = None
        self.outcome = UndoOutcome.RESUMED

    def obstacle(self, subject: Subject) -> str | None:
        return self.obstacle_now

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        return [LedgerEntry.at(self.name, "/board", subject.container.key, 0)]

    def apply(self, subject: Subject) -> None:
        self.applied += 1
        self.applied_with = [entry.id for entry in read(self.ledger)]
        if self.error:
            raise self.error

    def undo(self, entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        self.undone.append(entry.id)
        return self.outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def chalk(path: Path, monkeypatch: pytest.MonkeyPatch) -> Chalk:
    chalk = Chalk(path)
    monkeypatch.setitem(UNDO, chalk.name, ActUndo(chalk.undo, MadeBy.AGENT, quick=True))
    return chalk


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def rungs(path: Path, chalk: Chalk, clock: SetClock) -> Iterator[RungExecutor]:
    rungs = RungExecutor({"chalk": chalk}, Ledger(path), clock)
    yield rungs
    rungs.release_all()


def until_wanting(rungs: RungExecutor, wanted: Wanted, condition: Callable[[], bool]) -> None:
    """As the deciding loop does: submits again and again what it wants."""

    def wants() -> bool:
        rungs.want(wanted)
        return condition()

    until(wants, "the condition, while this is wanted")


WANTED: Wanted = {KEY: (SUBJECT, frozenset({"chalk"}))}


def test_the_entry_is_in_the_ledger_before_the_act_and_leaves_it_after_the_undoing(
    rungs: RungExecutor, chalk: Chalk, path: Path
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    assert chalk.applied_with == ["chalk:/board"]
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))
    assert chalk.undone == ["chalk:/board"]
    assert read(path) == []


def test_what_cannot_be_done_here_is_reported_and_retried_later(
    rungs: RungExecutor, chalk: Chalk, clock: SetClock
) -> None:
    chalk.obstacle_now = "the board is wet"
    rungs.want(WANTED)
    until(lambda: dict(rungs.troubles(KEY)) == {"chalk": "the board is wet"}, "a trouble")
    chalk.obstacle_now = None
    rungs.want(WANTED)
    assert not rungs.in_force(KEY)
    clock.now_ns = RETRY_NS
    until_wanting(rungs, WANTED, lambda: rungs.in_force(KEY) == {"chalk"})
    assert not rungs.troubles(KEY)


@pytest.mark.parametrize("error", [WardenError("the chalk broke"), RuntimeError("a fault of the rung's own")])
def test_half_of_an_act_is_undone(rungs: RungExecutor, chalk: Chalk, path: Path, error: Exception) -> None:
    chalk.error = error
    rungs.want(WANTED)
    until(lambda: "chalk" in rungs.troubles(KEY) and bool(chalk.undone), "an attempt undone")
    until(lambda: not rungs.in_force(KEY), "the rung undone")
    assert read(path) == []


def test_what_cannot_be_undone_stays_in_force_and_in_the_ledger(
    rungs: RungExecutor, chalk: Chalk, path: Path, clock: SetClock
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    chalk.outcome = UndoOutcome.FAILED
    until_wanting(rungs, {}, lambda: bool(chalk.undone))
    until(lambda: "chalk" in rungs.troubles(KEY), "a trouble")
    assert rungs.in_force(KEY) == {"chalk"}
    assert [entry.id for entry in read(path)] == ["chalk:/board"]
    chalk.outcome = UndoOutcome.RESUMED
    clock.now_ns = RETRY_NS
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))


def test_the_end_undoes_everything(rungs: RungExecutor, chalk: Chalk, path: Path) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    rungs.release_all()
    assert chalk.undone == ["chalk:/board"]
    assert read(path) == []
    assert not rungs.in_force(KEY)


def test_what_is_in_force_is_applied_again_now_and_then_with_the_same_entry(
    rungs: RungExecutor, chalk: Chalk, path: Path, clock: SetClock
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    size = path.stat().st_size
    until_wanting(rungs, WANTED, lambda: not rungs._containers[KEY].busy)
    assert chalk.applied == 1
    clock.now_ns = AGAIN_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 2)
    assert path.stat().st_size == size
    Ledger(path).done("chalk:/board")  # another process released everything
    until_wanting(rungs, WANTED, lambda: not rungs._containers[KEY].busy)
    clock.now_ns = 2 * AGAIN_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 3)
    assert chalk.applied_with == ["chalk:/board"]


def test_other_processes_have_it_applied_again_at_once(rungs: RungExecutor, chalk: Chalk) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    more: Wanted = {KEY: (replace(SUBJECT, processes=(ProcessId(7, 7),)), frozenset({"chalk"}))}
    until_wanting(rungs, more, lambda: chalk.applied == 2)


def test_what_is_not_finished_is_no_trouble_and_is_gone_on_with_soon(
    rungs: RungExecutor, chalk: Chalk, clock: SetClock
) -> None:
    chalk.error = UnfinishedError("half of the board is white")
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    assert not rungs.troubles(KEY)
    clock.now_ns = UNFINISHED_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 2)
    assert not chalk.undone


def test_what_fails_when_it_is_applied_again_is_undone(
    rungs: RungExecutor, chalk: Chalk, path: Path, clock: SetClock
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"}, "the rung in force")
    chalk.error = WardenError("another writer has wiped it")
    clock.now_ns = AGAIN_NS
    until_wanting(rungs, WANTED, lambda: not rungs.in_force(KEY))
    assert dict(rungs.troubles(KEY)) == {"chalk": "another writer has wiped it"}
    assert chalk.undone == ["chalk:/board"]
    until(lambda: read(path) == [], "an empty ledger")


def test_what_an_earlier_agent_left_is_undone_unless_it_is_wanted(path: Path, chalk: Chalk, clock: SetClock) -> None:
    Ledger(path).intend(LedgerEntry.at("chalk", "/board", KEY, 0))
    Ledger(path).intend(LedgerEntry.at("another act", "/board", KEY, 0))
    chalk.outcome = UndoOutcome.FAILED
    rungs = RungExecutor({"chalk": chalk}, Ledger(path), clock)
    assert rungs.in_force(KEY) == {"chalk"}
    rungs.want(WANTED)
    assert not chalk.undone
    until_wanting(rungs, {}, lambda: "chalk" in rungs.troubles(KEY))
    chalk.outcome = UndoOutcome.RESUMED
    clock.now_ns = RETRY_NS
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))
    assert [entry.act for entry in read(path)] == ["another act"]
    rungs.release_all()


@pytest.mark.parametrize("meanwhile", ["it is over", "it has other processes"])
def test_after_a_long_descent_only_what_is_wanted_by_then_is_climbed_and_on_whom(
    path: Path, chalk: Chalk, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    begun, wiped, subjects = threading.Event(), threading.Event(), list[Subject]()
    sponge = Chalk(path)
    sponge.name = "sponge"

    def wipe(_entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        begun.set()
        assert wiped.wait(DEADLINE_SECONDS)
        return UndoOutcome.RESUMED

    monkeypatch.setitem(UNDO, "sponge", ActUndo(wipe, MadeBy.AGENT, quick=True))
    monkeypatch.setattr(chalk, "apply", subjects.append)
    rungs = RungExecutor({"chalk": chalk, "sponge": sponge}, Ledger(path))
    until_wanting(rungs, {KEY: (SUBJECT, frozenset({"sponge"}))}, lambda: rungs.in_force(KEY) == {"sponge"})
    until_wanting(rungs, WANTED, begun.is_set)
    later = replace(SUBJECT, processes=(ProcessId(7, 7),))
    still: Wanted = {} if meanwhile == "it is over" else {KEY: (later, frozenset({"chalk"}))}
    rungs.want(still)
    wiped.set()
    until_wanting(rungs, still, lambda: not rungs.in_force(KEY) - {"chalk"})
    if still:
        until_wanting(rungs, still, lambda: rungs.in_force(KEY) == {"chalk"})
    rungs.release_all()
    assert [subject.processes for subject in subjects] == [later.processes for _ in subjects]
    assert bool(subjects) == bool(still)


def test_what_a_rung_notes_while_it_is_applied_is_what_is_undone(
    path: Path, chalk: Chalk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, undone = Ledger(path), list[LedgerEntry]()
    noted = replace(LedgerEntry.at("chalk", "/board", KEY, 0), device_bytes=(("GPU-a", 7),))

    def undo(entry: LedgerEntry, _proc: Procfs) -> UndoOutcome:
        undone.append(entry)
        return UndoOutcome.RESUMED

    monkeypatch.setitem(UNDO, "chalk", ActUndo(undo, MadeBy.AGENT, quick=True))
    monkeypatch.setattr(chalk, "apply", lambda _subject: ledger.intend(noted))
    rungs = RungExecutor({"chalk": chalk}, ledger)
    until_wanting(rungs, WANTED, lambda: rungs.in_force(KEY) == {"chalk"})
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))
    assert [entry.device_bytes for entry in undone] == [noted.device_bytes]
    rungs.release_all()


def test_a_container_is_released_once_a_thread_can_be_made_again(
    path: Path, chalk: Chalk, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(path).intend(LedgerEntry.at("chalk", "/board", KEY, 0))
    rungs = RungExecutor({"chalk": chalk}, Ledger(path), clock)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        rungs.want({})
        rungs.want({})
    assert rungs.failures == 1
    clock.now_ns = AGAIN_NS
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))
    rungs.release_all()
    assert chalk.undone == ["chalk:/board"]
