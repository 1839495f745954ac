# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rungs: the ledger first, one thing at a time, undone as after a crash, and told when it cannot be done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import WardenError
from agent.model import Container, ContainerKey, ProcessId
from agent.procfs import Procfs
from enforce import undoing
from enforce.entries import Entry
from enforce.ledger import Ledger, read
from enforce.model import Subject
from enforce.outcome import Outcome
from enforce.rungs import AGAIN_NS, RETRY_NS, UNFINISHED_NS, Rungs, UnfinishedError, Wanted

KEY = ContainerKey("docker:abc")
SUBJECT: Any = Subject(Container(KEY, "training", "docker"), (), frozenset(), rule=None)  # type: ignore[arg-type]
DEADLINE_SECONDS = 30.0


class Chalk:
    """A rung that leaves a mark; what it does is what the test says."""

    name = "chalk"

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.applied_with: list[str] = []
        self.undone: list[str] = []
        self.applied = 0
        self.obstacle_now: str | None = None
        self.error: Exception | None = None
        self.outcome = Outcome.RESUMED

    def obstacle(self, subject: Subject) -> str | None:
        return self.obstacle_now

    def intents(self, subject: Subject) -> Sequence[Entry]:
        return [Entry.at(self.name, "/board", subject.container.key, 0)]

    def apply(self, subject: Subject) -> None:
        self.applied += 1
        self.applied_with = [entry.id for entry in read(self.ledger)]
        if self.error:
            raise self.error

    def undo(self, entry: Entry, _proc: Procfs) -> Outcome:
        self.undone.append(entry.id)
        return self.outcome


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def chalk(path: Path, monkeypatch: pytest.MonkeyPatch) -> Chalk:
    chalk = Chalk(path)
    monkeypatch.setitem(undoing.UNDO, chalk.name, chalk.undo)
    return chalk


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rungs(path: Path, chalk: Chalk, clock: Clock) -> Iterator[Rungs]:
    rungs = Rungs({"chalk": chalk}, Ledger(path), clock)
    yield rungs
    rungs.release_all()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)


def until_wanting(rungs: Rungs, wanted: Wanted, condition: Callable[[], bool]) -> None:
    """As the deciding loop does: says again and again what it wants."""

    def wants() -> bool:
        rungs.want(wanted)
        return condition()

    until(wants)


WANTED: Wanted = {KEY: (SUBJECT, frozenset({"chalk"}))}


def test_the_entry_is_in_the_ledger_before_the_act_and_leaves_it_after_the_undoing(
    rungs: Rungs, chalk: Chalk, path: Path
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    assert chalk.applied_with == ["chalk:/board"]
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))
    assert chalk.undone == ["chalk:/board"]
    assert read(path) == []


def test_what_cannot_be_done_here_is_said_and_tried_again_later(rungs: Rungs, chalk: Chalk, clock: Clock) -> None:
    chalk.obstacle_now = "the board is wet"
    rungs.want(WANTED)
    until(lambda: dict(rungs.troubles(KEY)) == {"chalk": "the board is wet"})
    chalk.obstacle_now = None
    rungs.want(WANTED)
    assert not rungs.in_force(KEY)
    clock.now = RETRY_NS
    until_wanting(rungs, WANTED, lambda: rungs.in_force(KEY) == {"chalk"})
    assert not rungs.troubles(KEY)


def test_half_of_an_act_is_undone(rungs: Rungs, chalk: Chalk, path: Path) -> None:
    chalk.error = WardenError("the chalk broke")
    rungs.want(WANTED)
    until(lambda: "chalk" in rungs.troubles(KEY) and bool(chalk.undone))
    until(lambda: not rungs.in_force(KEY))
    assert read(path) == []


def test_what_cannot_be_undone_stays_in_force_and_in_the_ledger(
    rungs: Rungs, chalk: Chalk, path: Path, clock: Clock
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    chalk.outcome = Outcome.FAILED
    until_wanting(rungs, {}, lambda: bool(chalk.undone))
    until(lambda: "chalk" in rungs.troubles(KEY))
    assert rungs.in_force(KEY) == {"chalk"}
    assert [entry.id for entry in read(path)] == ["chalk:/board"]
    chalk.outcome = Outcome.RESUMED
    clock.now = RETRY_NS
    until_wanting(rungs, {}, lambda: not rungs.in_force(KEY))


def test_the_end_undoes_everything(rungs: Rungs, chalk: Chalk, path: Path) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    rungs.release_all()
    assert chalk.undone == ["chalk:/board"]
    assert read(path) == []
    assert not rungs.in_force(KEY)


def test_what_is_in_force_is_applied_again_now_and_then_with_the_same_entry(
    rungs: Rungs, chalk: Chalk, path: Path, clock: Clock
) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    size = path.stat().st_size
    until_wanting(rungs, WANTED, lambda: not rungs._held[KEY].busy)
    assert chalk.applied == 1
    clock.now = AGAIN_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 2)
    assert path.stat().st_size == size
    Ledger(path).done("chalk:/board")  # somebody released everything
    until_wanting(rungs, WANTED, lambda: not rungs._held[KEY].busy)
    clock.now = 2 * AGAIN_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 3)
    assert chalk.applied_with == ["chalk:/board"]


def test_other_processes_have_it_applied_again_at_once(rungs: Rungs, chalk: Chalk) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    more: Wanted = {KEY: (replace(SUBJECT, processes=(ProcessId(7, 7),)), frozenset({"chalk"}))}
    until_wanting(rungs, more, lambda: chalk.applied == 2)


def test_what_is_not_finished_is_no_trouble_and_is_gone_on_with_soon(rungs: Rungs, chalk: Chalk, clock: Clock) -> None:
    chalk.error = UnfinishedError("half of the board is white")
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    assert not rungs.troubles(KEY)
    clock.now = UNFINISHED_NS
    until_wanting(rungs, WANTED, lambda: chalk.applied == 2)
    assert not chalk.undone


def test_what_fails_when_it_is_applied_again_is_undone(rungs: Rungs, chalk: Chalk, path: Path, clock: Clock) -> None:
    rungs.want(WANTED)
    until(lambda: rungs.in_force(KEY) == {"chalk"})
    chalk.error = WardenError("somebody else has wiped it")
    clock.now = AGAIN_NS
    until_wanting(rungs, WANTED, lambda: not rungs.in_force(KEY))
    assert dict(rungs.troubles(KEY)) == {"chalk": "somebody else has wiped it"}
    assert chalk.undone == ["chalk:/board"]
    until(lambda: read(path) == [])


def test_what_an_earlier_agent_left_is_undone_unless_it_is_wanted(path: Path, chalk: Chalk, clock: Clock) -> None:
    Ledger(path).intend(Entry.at("chalk", "/board", KEY, 0))
    Ledger(path).intend(Entry.at("another act", "/board", KEY, 0))
    chalk.outcome = Outcome.FAILED
    rungs = Rungs({"chalk": chalk}, Ledger(path), clock)
    assert rungs.in_force(KEY) == {"chalk"}
    rungs.want(WANTED)
    assert not chalk.undone
    until_wanting(rungs, {}, lambda: "chalk" in rungs.troubles(KEY))
    chalk.outcome = Outcome.RESUMED
    clock.now = RETRY_NS
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

    def wipe(_entry: Entry, _proc: Procfs) -> Outcome:
        begun.set()
        assert wiped.wait(DEADLINE_SECONDS)
        return Outcome.RESUMED

    monkeypatch.setitem(undoing.UNDO, "sponge", wipe)
    monkeypatch.setattr(chalk, "apply", subjects.append)
    rungs = Rungs({"chalk": chalk, "sponge": sponge}, Ledger(path))
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
