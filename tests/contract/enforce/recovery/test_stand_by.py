# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The standby, on real processes that are stopped and real locks, and `gpuwarden release --stand-by` itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agent.core.model import ContainerKey
from agent.node.procfs import Procfs
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger, read
from enforce.ledger.run_lock import RunDirLock
from enforce.recovery.backstop import StandBy
from tools.harness.wait import until

PROC = Procfs()
CONTAINER = ContainerKey("docker:" + "a" * 64)


@pytest.fixture
def stopped() -> Iterator[int]:
    """The pid of a process that another program stopped."""
    with subprocess.Popen(["sleep", "3600"]) as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(process.pid), "the process to be stopped")
        yield process.pid
        process.kill()


def is_stopped(tgid: int) -> bool:
    return PROC.stat(tgid).state == "T"


def is_pending(tgid: int, number: int) -> bool:
    status = Path(f"/proc/{tgid}/status").read_text()
    masks = re.findall(r"^(?:SigPnd|ShdPnd):\t([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) & 1 << number - 1 for mask in masks)


def note(run_dir: Path, tgid: int) -> None:
    """What an agent writes before it acts."""
    with closing(Ledger(run_dir / "ledger.jsonl")) as ledger:
        ledger.intend(LedgerEntry.of("pace", PROC.process_id(tgid), CONTAINER, 0))


@contextmanager
def standing_by(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gpuwarden", "release", "--stand-by", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            assert "standby: waiting" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def test_nothing_is_undone_while_an_agent_enforces_and_everything_once_it_is_gone(tmp_path: Path, stopped: int) -> None:
    owner = RunDirLock.take(tmp_path, PROC)
    note(tmp_path, stopped)
    stand_by = StandBy(tmp_path)
    assert not stand_by.look()
    assert is_stopped(stopped)
    owner.close()
    assert stand_by.look()
    assert not is_stopped(stopped)
    assert read(tmp_path / "ledger.jsonl") == []
    RunDirLock.take(tmp_path, PROC, timeout_seconds=0).close()


def test_a_second_agent_is_stood_by_as_the_first_one(tmp_path: Path, stopped: int) -> None:
    stand_by = StandBy(tmp_path)
    assert stand_by.look()
    for _ in range(2):
        owner = RunDirLock.take(tmp_path, PROC, timeout_seconds=0)
        note(tmp_path, stopped)
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: is_stopped(stopped), "the process to be stopped")
        owner.close()
        assert stand_by.look()
        assert not is_stopped(stopped)


def test_what_cannot_be_undone_is_reported_once_a_second_and_keeps_nothing_else(
    tmp_path: Path, stopped: int, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    note(tmp_path, stopped)
    with closing(Ledger(tmp_path / "ledger.jsonl")) as ledger:
        ledger.intend(LedgerEntry.at("an act of a later version", "/somewhere", CONTAINER, 0))
    stand_by = StandBy(tmp_path, clock=lambda: now)
    assert not stand_by.look()
    assert not is_stopped(stopped)
    reported = len(caplog.records)
    assert "released 1 of their acts" in caplog.text
    assert "use the newer one" in caplog.text
    assert not stand_by.look()
    assert len(caplog.records) == reported
    now += 1.0
    assert not stand_by.look()
    assert len(caplog.records) > reported


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_ledger_that_is_not_to_be_trusted_is_not_taken_for_an_empty_one(
    tmp_path: Path, stopped: int, caplog: pytest.LogCaptureFixture
) -> None:
    note(tmp_path, stopped)
    path = tmp_path / "ledger.jsonl"
    os.chown(path, 65534, -1)
    stand_by = StandBy(tmp_path)
    assert not stand_by.look()
    assert "belongs to user 65534" in caplog.text
    done = release(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{path} belongs to user 65534: if the agent ran as that user, release as that user too" in done.stderr
    assert is_stopped(stopped)
    os.chown(path, 0, -1)
    path.chmod(0o666)
    done = release(tmp_path)
    assert done.returncode == 1
    assert "chmod go-w it" in done.stderr
    path.chmod(0o600)
    assert release(tmp_path).returncode == 0
    assert not is_stopped(stopped)
    path.unlink()
    assert release(tmp_path).returncode == 0  # no agent has ever enforced here


def release(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwarden", "release", "--run-dir", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_ledger_without_anything_new_is_not_read_again(tmp_path: Path, stopped: int) -> None:
    note(tmp_path, stopped)
    stand_by = StandBy(tmp_path)
    assert stand_by.look()
    os.kill(stopped, signal.SIGSTOP)  # by another program
    until(lambda: is_stopped(stopped), "the process to be stopped")
    assert stand_by.look()
    assert is_stopped(stopped)


def test_the_command_releases_and_ends_on_a_signal(tmp_path: Path, stopped: int) -> None:
    owner = RunDirLock.take(tmp_path, PROC)
    note(tmp_path, stopped)
    with standing_by(tmp_path) as process:
        assert is_stopped(stopped)
        owner.close()
        until(lambda: not is_stopped(stopped), "the process to run")
        process.terminate()
        assert process.wait(timeout=20) == 0


def test_on_sigterm_it_waits_for_the_agent_that_is_ending_too(tmp_path: Path, stopped: int) -> None:
    owner = RunDirLock.take(tmp_path, PROC)
    note(tmp_path, stopped)
    with standing_by(tmp_path) as process:
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        assert is_stopped(stopped)
        owner.close()
        assert process.wait(timeout=20) == 0
        assert not is_stopped(stopped)


def test_a_second_signal_ends_it_at_once_and_is_a_failure(tmp_path: Path, stopped: int) -> None:
    owner = RunDirLock.take(tmp_path, PROC)
    note(tmp_path, stopped)
    with standing_by(tmp_path) as process:
        process.terminate()
        until(lambda: not is_pending(process.pid, signal.SIGTERM), "the first to be received: two would be one")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
        process.terminate()
        assert process.wait(timeout=20) == 1
        assert is_stopped(stopped)
    owner.close()
