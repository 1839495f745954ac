# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every hold is in the ledger before it is in force, and as long as it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from agent.core.errors import SetupError
from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.launch.ledgered_rules import LaunchRules
from enforce.actuators.launch.levels import LevelChange
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger
from enforce.model import FULL, Level, Target
from tests.support.clocks import SetClock

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

    def current(self, targets: Collection[Target]) -> dict[Target, Level]:
        return {target: self.levels[target] for target in targets if target in self.levels}

    def apply(self, target: Target, level: Level) -> None:
        self.levels[target] = level


class Unreadable(Procfs):
    """As when no file can be opened."""

    def is_alive(self, process: ProcessId) -> bool:
        return True

    def stat(self, tgid: int) -> None:  # type: ignore[override]
        raise SetupError(f"stat of process {tgid} cannot be read now")


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


def test_the_entry_of_a_process_that_cannot_be_read_stays(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    holds = LaunchRules(Rules(), ledger, Unreadable())
    holds.perform([LevelChange(TARGET, FULL, PACED)])
    holds.release_all()
    holds.perform([])
    assert len(outstanding(ledger)) == 1
