# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A guardian that cannot be started is started later; none is started after the end."""

from __future__ import annotations

import errno
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.core.model import ContainerKey, ProcessId
from enforce.actuators.undo import UndoResult
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger, read
from enforce.policy.load import parse
from enforce.recovery import supervisor
from enforce.recovery.supervisor import BackstopKeeper, Supervisor


class Probes:
    """With a control block of its own."""

    def __init__(self) -> None:
        self.control = SimpleNamespace(agent_tgid=0, heartbeat_ns=0, lease_until_ns=0)
        self.bpf = SimpleNamespace(map_fd=lambda _name: 0)

    def map(self, _name: str) -> Any:
        return SimpleNamespace(share=lambda _entries: [self.control])


class Guardian:
    """Ends with its standard input, or at once."""

    def __init__(self, ends: bool) -> None:
        self._ended = threading.Event()
        self.stdin = SimpleNamespace(close=self._ended.set)
        self.returncode: int | None = None
        if ends:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        assert self._ended.wait(timeout or 60)
        self.returncode = -9
        return -9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def it(path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.setattr(supervisor, "_RESTART_SECONDS", 0.0)
    monkeypatch.setattr(BackstopKeeper, "_spawn", lambda _self, _now_ns: None)
    probes: Any = Probes()
    return Supervisor(probes, path, parse("version: 1\n", "defaults").tuning)


def guardians(monkeypatch: pytest.MonkeyPatch, *outcomes: Guardian | OSError) -> threading.Event:
    """What starting one comes to, each time; set when the last was started."""
    rest, started = list(outcomes), threading.Event()

    def start(*_args: object, **_more: object) -> Guardian:
        outcome = rest.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        if not rest:
            started.set()
        return outcome

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_a_guardian_that_cannot_be_started_again_is_tried_until_it_can(
    it: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack = OSError(errno.ENOMEM, "no memory")
    started = guardians(monkeypatch, Guardian(ends=True), lack, lack, Guardian(ends=False))
    it.start()
    assert started.wait(60)
    it.stop()
    assert it.restarts == 1


def test_after_a_guardians_death_the_entries_stay_as_the_rules_do(
    it: Supervisor, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ProcessId(2**22 + 7, 1)  # no process ever has this pid
    ledger = Ledger(path)
    for act in ("pace", "hold"):
        ledger.intend(LedgerEntry.of(act, gone, ContainerKey("c"), 0))
    started = guardians(monkeypatch, Guardian(ends=True), Guardian(ends=False))
    it.start()
    assert started.wait(60)
    assert {entry.act for entry in read(path)} == {"pace", "hold"}
    it.stop()
    assert read(path) == []


def test_a_failure_while_undoing_does_not_end_the_watch(it: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [MemoryError(), RuntimeError("broken")]

    def undo_all(*_args: object, **_more: object) -> list[UndoResult]:
        if failures:
            raise failures.pop()
        return []

    monkeypatch.setattr(supervisor, "undo_all", undo_all)
    started = guardians(monkeypatch, Guardian(ends=True), Guardian(ends=False))
    it.start()
    assert started.wait(60)
    it.stop()
    assert it.restarts == 1


def test_no_guardian_is_started_after_the_end(it: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    guardians(monkeypatch, Guardian(ends=False))
    it.start()
    it.stop()
    it._spawn()  # a second one would fail the test: there is none
