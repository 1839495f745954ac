# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`evict`, on real processes: asked first, killed after the grace if need be, and MPS clients never killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from agent.core.errors import WardenError
from agent.core.model import Container, ContainerKey, DeviceUuid, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.evict import SETTLES_NS, STEP_NS, Evict, EvictError
from enforce.actuators.ladder import UnfinishedError
from enforce.model import Subject
from enforce.policy.model import Limits, Match, OfflineRule
from tests.support.clocks import SetClock
from tests.support.groups import process_of
from tools.harness.wait import until

GRACE_NS = 30_000_000_000
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
CIVIL = "import signal; print('ready', flush=True); signal.pause()"


class Mps:
    """What the MPS daemons would say."""

    def __init__(self) -> None:
        self.clients: set[ProcessId] = set()
        self.error: WardenError | None = None
        self.terminated: list[ProcessId] = []

    def terminate(self, process: ProcessId) -> bool:
        if self.error:
            raise self.error
        if process in self.clients:
            self.terminated.append(process)
        return process in self.clients


@pytest.fixture
def clock() -> SetClock:
    return SetClock(1_000_000_000_000)


@pytest.fixture
def mps() -> Mps:
    return Mps()


@pytest.fixture
def evict(clock: SetClock, mps: Mps) -> Evict:
    return Evict(Procfs(), mps, clock)


@pytest.fixture
def start() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def program(text: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started.append(process)
        return process

    yield program
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def subject(*processes: ProcessId) -> Subject:
    rule = OfflineRule("t", Match(), "headroom", None, 1.0, Limits(None, 0.05, 1, None, GRACE_NS), ("evict",))
    return Subject(Container(ContainerKey("c"), "training", "runc"), processes, frozenset[DeviceUuid](), rule)


def test_a_process_that_is_asked_ends_and_none_is_killed(
    evict: Evict, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(CIVIL)
    target = subject(process_of(program.pid))
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert program.wait(timeout=30) == -signal.SIGTERM
    evict.apply(target)
    assert (evict.asked_to_end, evict.killed) == (1, 0)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_and_not_before(
    evict: Evict, clock: SetClock, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(DEAF)
    target = subject(process_of(program.pid))
    for _ in range(3):
        with pytest.raises(UnfinishedError):
            evict.apply(target)
        clock.now_ns += GRACE_NS // 3
    assert program.poll() is None
    assert evict.asked_to_end == 1
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert program.wait(timeout=30) == -signal.SIGKILL
    evict.apply(target)
    assert evict.killed == 1


def test_a_stopped_process_is_made_to_run_so_that_it_can_end(
    evict: Evict, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(CIVIL)
    target = subject(process_of(program.pid))
    program.send_signal(signal.SIGSTOP)
    until(lambda: Procfs().stat(program.pid).state == "T", "the stop")
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert program.wait(timeout=30) == -signal.SIGTERM


def test_an_mps_client_loses_the_device_and_is_asked_but_never_killed(
    evict: Evict, clock: SetClock, mps: Mps, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(DEAF)
    target = subject(process_of(program.pid))
    mps.clients = set(target.processes)
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert (mps.terminated, evict.asked_to_end) == (list(target.processes), 0)  # a signal might come first
    clock.now_ns += SETTLES_NS
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert evict.asked_to_end == 1
    for _ in range(5):
        clock.now_ns += GRACE_NS
        with pytest.raises(EvictError, match=f"process {program.pid} has not ended and is not killed"):
            evict.apply(target)
    assert program.poll() is None
    assert (evict.asked_to_end, evict.killed) == (1, 0)


def test_where_it_is_unknown_whether_it_is_an_mps_client_it_gets_no_signal_until_that_is_known(
    evict: Evict, clock: SetClock, mps: Mps, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(CIVIL)
    mps.error = WardenError("the daemon does not answer")
    target = subject(process_of(program.pid))
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    clock.now_ns += GRACE_NS
    with pytest.raises(EvictError, match="the daemon does not answer"):
        evict.apply(target)
    assert program.poll() is None
    assert evict.asked_to_end == 0
    mps.error = None
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert program.wait(timeout=30) == -signal.SIGTERM


def test_while_mps_takes_long_no_process_is_acted_on_that_may_not_be_wanted_any_more(
    evict: Evict,
    mps: Mps,
    clock: SetClock,
    start: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (start(CIVIL) for _ in range(2))
    asked: list[ProcessId] = []

    def slowly(process: ProcessId) -> bool:
        asked.append(process)
        clock.now_ns += STEP_NS
        return False

    monkeypatch.setattr(mps, "terminate", slowly)
    both = subject(*(process_of(program.pid) for program in (first, second)))
    with pytest.raises(UnfinishedError):
        evict.apply(both)
    assert [process.tgid for process in asked] == [first.pid]
    assert second.poll() is None
    with pytest.raises(UnfinishedError):
        evict.apply(both)  # still wanted
    assert [process.tgid for process in asked] == [first.pid, second.pid]


def test_a_daemon_that_hangs_keeps_no_other_process_from_its_end_and_is_reported(
    evict: Evict,
    mps: Mps,
    clock: SetClock,
    start: Callable[[str], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, other = (start(CIVIL) for _ in range(2))

    def hangs(process: ProcessId) -> bool:
        if process.tgid == client.pid:
            clock.now_ns += 5 * STEP_NS
            raise WardenError("the daemon does not answer")
        return False

    monkeypatch.setattr(mps, "terminate", hangs)
    both = subject(*(process_of(program.pid) for program in (client, other)))
    for _ in range(2):
        with pytest.raises(UnfinishedError):
            evict.apply(both)
    assert other.wait(timeout=30) == -signal.SIGTERM
    clock.now_ns += GRACE_NS
    with pytest.raises(EvictError, match="end it by hand"):
        evict.apply(both)


def test_a_pid_that_is_another_processes_now_is_left_alone(
    evict: Evict, clock: SetClock, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(CIVIL)
    now = process_of(program.pid)
    evict.apply(subject(ProcessId(now.tgid, now.start_ticks - 1)))
    assert program.poll() is None
    assert evict.asked_to_end == 0


def test_a_process_that_was_asked_long_ago_is_asked_again_before_it_is_killed(
    evict: Evict, clock: SetClock, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    program = start(DEAF)
    target = subject(process_of(program.pid))
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    clock.now_ns += 100 * GRACE_NS  # in between it was no longer wanted out
    with pytest.raises(UnfinishedError):
        evict.apply(target)
    assert program.poll() is None
    assert (evict.asked_to_end, evict.killed) == (2, 0)
