# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The entry of a removed rule stays in the ledger while a real process is stopped, frozen or both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.model import ContainerKey
from agent.node.procfs import Procfs
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from enforce.actuators.launch.ledgered_rules import LedgeredRules
from enforce.actuators.undo import release_all
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import Target
from tests.support.groups import Group, group, process_of
from tools.harness.wait import until

LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)]).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def v1() -> Iterator[Group]:
    with group(1) as made:
        yield made


def test_a_process_that_a_v1_freezer_froze_while_it_was_stopped_keeps_its_entry(v1: Group, tmp_path: Path) -> None:
    tgid = v1.spinner()
    path = tmp_path / "ledger"
    rules = LedgeredRules("pace", Ledger(path), Procfs())
    rules.put(Target(process_of(tgid), v1.key, (0,), None), lambda: None)
    with Cgroup(FreezerCgroup.of(1, str(v1.folder))) as cgroup:
        cgroup.freeze()
        until(cgroup.is_frozen, "the freezer")
        os.kill(tgid, signal.SIGSTOP)  # is delivered when it thaws
        rules.remove(process_of(tgid), lambda: None)
        rules.maintain(0)
        assert [entry.act for entry in read(path)] == ["pace"]
        cgroup.thaw()
    until(lambda: Procfs().stat(tgid).state == "T", "the stop")
    rules.maintain(0)
    assert [entry.act for entry in read(path)] == ["pace"]
    os.kill(tgid, signal.SIGCONT)
    until(lambda: Procfs().stat(tgid).state not in "TD", "it to run")
    rules.maintain(0)
    assert read(path) == []


def test_a_process_that_was_stopped_before_a_v1_freezer_froze_it_runs_once_it_is_released_and_thawed(
    v1: Group, tmp_path: Path
) -> None:
    tgid = v1.spinner()
    ledger = Ledger(tmp_path / "ledger")
    ledger.intend(LedgerEntry.of("pace", process_of(tgid), v1.key, 1))
    os.kill(tgid, signal.SIGSTOP)
    until(lambda: Procfs().stat(tgid).state == "T", "the stop")
    with Cgroup(FreezerCgroup.of(1, str(v1.folder))) as cgroup:
        cgroup.freeze()
        until(cgroup.is_frozen, "the freezer")
        (released,) = release_all(tmp_path / "ledger")
        assert released.outcome is UndoOutcome.RESUMED
        cgroup.thaw()
    until(lambda: Procfs().stat(tgid).state not in "TD", "it to run")


def test_a_process_whose_first_thread_has_ended_keeps_its_entry_while_the_others_are_stopped(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            until(lambda: Procfs().stat(program.pid).state == "Z", "the end of the first thread")
            rules = LedgeredRules("pace", Ledger(tmp_path / "ledger"), Procfs())
            target = Target(process_of(program.pid), ContainerKey("c"), (0,), None)
            rules.put(target, lambda: None)
            os.kill(program.pid, signal.SIGSTOP)
            until(lambda: "T" in Procfs().thread_states(program.pid), "the stop")
            rules.remove(target.process, lambda: None)
            rules.maintain(0)
            assert [entry.act for entry in read(tmp_path / "ledger")] == ["pace"]
        finally:
            program.kill()
