# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A rule has its entry in the ledger before it is written, while it is in force, and until its process runs again."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.launch.ledgered_rules import REAFFIRM_NS, LedgeredRules
from enforce.ledger.ledger import Ledger, LedgerError
from enforce.model import Target
from tests.support.processes import show_process

PROCESS = ProcessId(7, 1)
TARGET = Target(PROCESS, ContainerKey("c"), (0,), None)


class RefusingLedger(Ledger):
    """As on a full disk, while `refuses`."""

    refuses = False

    def intend(self, entry: object) -> None:
        if self.refuses:
            raise LedgerError("the ledger cannot be written")
        super().intend(entry)  # type: ignore[arg-type]

    def done(self, *entry_ids: str) -> None:
        if self.refuses:
            raise LedgerError("the ledger cannot be written")
        super().done(*entry_ids)


class Kernel:
    """The rule map, and whether the entry was outstanding when the rule was written."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.rules = 0
        self.full = False
        self.outstanding_at_write: list[bool] = []

    def write(self) -> None:
        self.outstanding_at_write.append(bool(self._ledger.outstanding()))
        if self.full:
            raise OSError(errno.E2BIG, "the map is full")
        self.rules = 1

    def delete(self) -> None:
        self.rules = 0


@pytest.fixture
def ledger(tmp_path: Path) -> RefusingLedger:
    return RefusingLedger(tmp_path / "ledger")


@pytest.fixture
def kernel(ledger: Ledger) -> Kernel:
    return Kernel(ledger)


@pytest.fixture
def rules(tmp_path: Path, ledger: Ledger) -> LedgeredRules:
    show_process(tmp_path, PROCESS)
    return LedgeredRules("pace", ledger, Procfs(str(tmp_path)))


def acts(ledger: Ledger) -> list[str]:
    return [entry.act for entry in ledger.outstanding()]


def test_the_entry_is_in_the_ledger_before_the_rule_is_written(
    rules: LedgeredRules, ledger: Ledger, kernel: Kernel
) -> None:
    rules.put(TARGET, kernel.write)
    assert kernel.outstanding_at_write == [True]
    assert acts(ledger) == ["pace"]


def test_a_rule_whose_entry_cannot_be_written_is_not_written(
    rules: LedgeredRules, ledger: RefusingLedger, kernel: Kernel
) -> None:
    ledger.refuses = True
    with pytest.raises(LedgerError):
        rules.put(TARGET, kernel.write)
    assert not kernel.rules


@pytest.mark.parametrize("why", [errno.EPERM, errno.EACCES])  # no capability; AppArmor
def test_a_process_that_could_not_be_resumed_gets_no_rule(
    tmp_path: Path, rules: LedgeredRules, ledger: Ledger, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    def forbid(_fd: int, number: int) -> None:
        assert number == 0  # nothing that a process could notice
        raise OSError(why, os.strerror(why))

    here = ProcessId(os.getpid(), 1)
    show_process(tmp_path, here)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", forbid)
        with pytest.raises(SetupError, match="could not be resumed"):
            rules.put(TARGET._replace(process=here), kernel.write)
    assert not kernel.rules
    assert acts(ledger) == []
    rules.put(TARGET._replace(process=here), kernel.write)
    assert kernel.rules


@pytest.mark.parametrize("state", ["T", "D"])  # D: frozen by a v1 freezer, and perhaps stopped as well
def test_the_entry_of_a_removed_rule_stays_while_its_process_may_be_stopped(
    tmp_path: Path, rules: LedgeredRules, ledger: Ledger, kernel: Kernel, state: str
) -> None:
    show_process(tmp_path, PROCESS, state)
    rules.put(TARGET, kernel.write)
    rules.remove(PROCESS, kernel.delete)
    assert not kernel.rules
    rules.maintain(0)
    assert acts(ledger) == ["pace"]
    show_process(tmp_path, PROCESS, "S")
    rules.maintain(0)
    assert acts(ledger) == []


def test_the_entry_of_a_removed_rule_is_closed_when_its_pid_is_another_process(
    tmp_path: Path, rules: LedgeredRules, ledger: Ledger, kernel: Kernel
) -> None:
    rules.put(TARGET, kernel.write)
    rules.remove(PROCESS, kernel.delete)
    show_process(tmp_path, ProcessId(PROCESS.tgid, PROCESS.start_ticks + 1), "T")
    rules.maintain(0)
    assert acts(ledger) == []


def test_the_entry_of_a_process_that_cannot_be_read_stays(
    rules: LedgeredRules, ledger: Ledger, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_self: Procfs, tgid: int) -> None:
        raise SetupError(f"stat of process {tgid} cannot be read now")

    rules.put(TARGET, kernel.write)
    rules.remove(PROCESS, kernel.delete)
    monkeypatch.setattr(Procfs, "stat", unreadable)
    rules.maintain(0)
    assert acts(ledger) == ["pace"]


def test_an_entry_that_another_writer_closed_comes_back_while_the_rule_is_in_force(
    rules: LedgeredRules, ledger: Ledger, kernel: Kernel
) -> None:
    rules.put(TARGET, kernel.write)
    ledger.done(ledger.outstanding()[0].id)
    rules.maintain(REAFFIRM_NS)
    assert acts(ledger) == ["pace"]


def test_a_rule_that_is_put_again_keeps_its_entry(rules: LedgeredRules, ledger: Ledger, kernel: Kernel) -> None:
    rules.put(TARGET, kernel.write)
    rules.remove(PROCESS, kernel.delete)
    rules.put(TARGET, kernel.write)
    rules.maintain(0)  # the process runs: the entry of the first rule could be closed
    assert acts(ledger) == ["pace"]


def test_a_rule_for_which_the_kernel_has_no_room_costs_one_line_until_its_process_ends(
    tmp_path: Path, rules: LedgeredRules, ledger: Ledger, kernel: Kernel
) -> None:
    kernel.full = True
    sizes = set()
    for _ in range(3):
        rules.maintain(0)
        with pytest.raises(OSError, match="full"):
            rules.put(TARGET, kernel.write)
        sizes.add((tmp_path / "ledger").stat().st_size)
    assert len(sizes) == 1
    (tmp_path / str(PROCESS.tgid) / "stat").unlink()
    rules.maintain(0)
    assert acts(ledger) == []


def test_an_entry_that_cannot_be_closed_is_counted_and_closed_later(
    rules: LedgeredRules, ledger: RefusingLedger, kernel: Kernel
) -> None:
    rules.put(TARGET, kernel.write)
    rules.remove(PROCESS, kernel.delete)
    ledger.refuses = True
    rules.maintain(0)
    assert rules.failures == 1
    ledger.refuses = False
    rules.maintain(0)
    assert acts(ledger) == []
