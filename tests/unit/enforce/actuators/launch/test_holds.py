# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every hold is in the ledger before it is in force, and as long as it is."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from agent.core.model import ContainerKey, ProcessId
from agent.node.pidfd import Pidfd
from agent.node.proc_parse import Stat
from agent.node.procfs import Procfs
from enforce.actuators.launch.ledgered_rules import LaunchRules
from enforce.actuators.launch.levels import LevelChange
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger
from enforce.model import FULL, Level, Target
from tests.support.clocks import SetClock
from tests.support.processes import show_process

SECOND = 1_000_000_000
PROCESS = ProcessId(7, 1)
TARGET = Target(PROCESS, ContainerKey("c"), (0,), None)
PACED = Level(pace=True, share_ratio=0.5)


class Rules:
    """The kernel's."""

    name = "pace"
    foreign_writes = 0

    def __init__(self) -> None:
        self.levels: dict[Target, Level] = {}
        self.disowned: list[ProcessId] = []
        self.error: Exception | None = None

    def current(self, targets: Collection[Target]) -> dict[Target, Level]:
        return {target: self.levels[target] for target in targets if target in self.levels}

    def apply(self, target: Target, level: Level) -> None:
        if self.error:
            raise self.error
        self.levels[target] = level

    def disown(self, process: ProcessId) -> None:
        self.disowned.append(process)


class Unreadable(Procfs):
    """As when no file can be opened, from the time on that `full` says."""

    full = False

    def is_alive(self, process: ProcessId) -> bool:
        return self.full or super().is_alive(process)

    def stat(self, tgid: int) -> Stat:
        if self.full:
            raise SetupError(f"stat of process {tgid} cannot be read now")
        return super().stat(tgid)


def outstanding(ledger: Ledger) -> list[str]:
    return [entry.id for entry in ledger.outstanding()]


def test_an_entry_that_another_writer_closed_comes_back_while_the_rule_is_in_force(tmp_path: Path) -> None:
    ledger, clock = Ledger(tmp_path / "ledger"), SetClock()
    holds = LaunchRules(Rules(), ledger, Procfs(str(tmp_path)), clock)
    holds.perform([LevelChange(TARGET, FULL, PACED)])
    entry = LedgerEntry.of("pace", PROCESS, TARGET.container, 0)
    assert outstanding(ledger) == [entry.id]
    ledger.done(entry.id)
    clock.now_ns += 5 * SECOND
    holds.perform([])
    assert outstanding(ledger) == [entry.id]


def test_an_entry_that_is_there_is_not_written_again_and_one_that_is_released_does_not_come_back(
    tmp_path: Path,
) -> None:
    ledger, clock = Ledger(tmp_path / "ledger"), SetClock()
    holds = LaunchRules(Rules(), ledger, Procfs(str(tmp_path)), clock)
    holds.perform([LevelChange(TARGET, FULL, PACED)])
    size = (tmp_path / "ledger").stat().st_size
    clock.now_ns += 5 * SECOND
    holds.perform([LevelChange(TARGET, PACED, Level(pace=True, share_ratio=0.25))])
    assert (tmp_path / "ledger").stat().st_size == size
    holds.release_all()
    clock.now_ns += 5 * SECOND
    holds.perform([])
    assert outstanding(ledger) == []


def test_the_entry_of_a_process_that_cannot_be_read_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, proc = Ledger(tmp_path / "ledger"), Unreadable(str(tmp_path))
    holds = LaunchRules(Rules(), ledger, proc)
    holds.perform([LevelChange(TARGET, FULL, PACED)])
    monkeypatch.setattr(Unreadable, "full", True)
    holds.release_all()
    holds.perform([])
    assert len(outstanding(ledger)) == 1


def test_a_rule_that_is_refused_is_counted_each_time_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ProcessId(os.getpid(), 1)
    show_process(tmp_path, here)
    monkeypatch.setattr(Pidfd, "may_signal", lambda _self: False)
    rules = LaunchRules(Rules(), Ledger(tmp_path / "ledger"), Procfs(str(tmp_path)))
    for _ in range(3):
        rules.perform([LevelChange(TARGET._replace(process=here), FULL, PACED)])
    assert rules.losses()["rules:refused"] == 3
    assert sum("could not be resumed" in record.message for record in caplog.records) == 1
    assert rules.in_force() == {}


def test_a_process_that_gets_no_rule_of_its_own_is_stopped_by_none_that_it_was_forked_under(tmp_path: Path) -> None:
    show_process(tmp_path, PROCESS)
    kernel = Rules()
    kernel.error = OSError("the map is full")
    rules = LaunchRules(kernel, Ledger(tmp_path / "ledger"), Procfs(str(tmp_path)))
    rules.perform([LevelChange(TARGET, FULL, PACED)])
    assert kernel.disowned == [PROCESS]


def test_processes_of_no_rule_are_disowned_once(tmp_path: Path) -> None:
    kernel = Rules()
    rules = LaunchRules(kernel, Ledger(tmp_path / "ledger"), Procfs(str(tmp_path)))
    first, second = ProcessId(8, 1), ProcessId(9, 1)
    for spared in ({first}, {first, second}, {second}, {first, second}):
        rules.disown(frozenset(spared))
    assert kernel.disowned == [first, second, first]
