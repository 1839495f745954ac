# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Locking, saving and releasing over a driver that may refuse any call: none stays locked, no foreign lock is taken."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import GoneError, SetupError
from agent.core.model import Container, ContainerKey, ProcessId
from agent.node.pidfd import check_identity
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint import driver as codes
from enforce.actuators.checkpoint import helper, rungs, transitions
from enforce.actuators.checkpoint.driver import (
    AnswerKind,
    CallError,
    CheckpointState,
    HelperAnswer,
    NvmlMemory,
    RoomChecked,
    parse_answer,
)
from enforce.actuators.checkpoint.helper import DriverLibrary
from enforce.actuators.checkpoint.rungs import Checkpoints, room_bytes
from enforce.actuators.checkpoint.transitions import reason_not_running
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, LedgerError
from enforce.model import Subject
from tests.support.clocks import SleepClock

TGID = 4321
_WANTED = {
    "Lock": (CheckpointState.RUNNING, CheckpointState.LOCKED),
    "Checkpoint": (CheckpointState.LOCKED, CheckpointState.CHECKPOINTED),
    "Restore": (CheckpointState.CHECKPOINTED, CheckpointState.LOCKED),
    "Unlock": (CheckpointState.LOCKED, CheckpointState.RUNNING),
}
answers = st.builds(
    HelperAnswer,
    st.sampled_from(AnswerKind),
    st.none() | st.sampled_from(CheckpointState),
    st.none() | st.sampled_from(CheckpointState),
    st.none() | st.text(min_size=1),
    st.none() | st.dictionaries(st.text(), st.integers(0, 2**40)),
)


class FakeDriver:
    """The documented state machine. `refusals`: what each further call of that name returns instead of acting."""

    def __init__(
        self, now: CheckpointState = CheckpointState.RUNNING, refusals: dict[str, list[int]] | None = None
    ) -> None:
        self.now = now
        self.refusals = refusals or {}
        self.calls: list[str] = []
        self.becomes: list[CheckpointState] = []  # on its own: one before each look at it

    def state(self, _tgid: int) -> CheckpointState:
        if self.becomes:
            self.now = self.becomes.pop(0)
        return self.now

    def lock(self, _tgid: int, _limit_ms: int) -> None:
        self._move("Lock")

    def checkpoint(self, _tgid: int) -> None:
        self._move("Checkpoint")

    def restore(self, _tgid: int) -> None:
        self._move("Restore")

    def unlock(self, _tgid: int) -> None:
        self._move("Unlock")

    def _move(self, call: str) -> None:
        self.calls.append(call)
        codes_left = self.refusals.get(call, [])
        code = codes_left.pop(0) if codes_left else 0
        wanted, after = _WANTED[call]
        if code == 0 and self.now is not wanted:
            code = codes.ILLEGAL_STATE
        if code:
            raise CallError(call, code)
        self.now = after


def test_a_lock_and_a_swap_go_one_way() -> None:
    driver = FakeDriver()
    assert transitions.lock(driver, TGID, 100) == HelperAnswer(
        AnswerKind.DONE, CheckpointState.RUNNING, CheckpointState.LOCKED
    )
    driver = FakeDriver()
    assert transitions.swap_out(driver, TGID, 100) == HelperAnswer(
        AnswerKind.DONE, CheckpointState.RUNNING, CheckpointState.CHECKPOINTED
    )
    assert transitions.swap_in(driver, TGID) == HelperAnswer(
        AnswerKind.DONE, CheckpointState.CHECKPOINTED, CheckpointState.LOCKED
    )
    assert transitions.unlock(driver, TGID) == HelperAnswer(
        AnswerKind.DONE, CheckpointState.LOCKED, CheckpointState.RUNNING
    )


@pytest.mark.parametrize("now", [CheckpointState.LOCKED, CheckpointState.CHECKPOINTED, CheckpointState.FAILED])
def test_what_is_not_running_is_locked_by_another_program(now: CheckpointState) -> None:
    driver = FakeDriver(now)
    assert transitions.lock(driver, TGID, 100).kind is AnswerKind.FOREIGN
    assert transitions.swap_out(driver, TGID, 100).kind is AnswerKind.FOREIGN
    assert driver.calls == []


def test_a_lock_that_is_ours_is_saved_where_it_is() -> None:
    driver = FakeDriver(CheckpointState.LOCKED)
    assert transitions.swap_out(driver, TGID, 100, ours=True).after is CheckpointState.CHECKPOINTED
    assert driver.calls == ["Checkpoint"]
    assert transitions.swap_out(driver, TGID, 100, ours=True).kind is AnswerKind.DONE  # and again
    assert driver.calls == ["Checkpoint"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (codes.NOT_SUPPORTED, AnswerKind.UNSUPPORTED),
        (codes.OUT_OF_MEMORY, AnswerKind.NO_ROOM),
        (codes.OPERATING_SYSTEM, AnswerKind.FAILED),  # that is no proof that it has ended
        (999, AnswerKind.FAILED),
    ],
)
def test_what_can_be_locked_but_not_saved_is_unlocked_again(code: int, kind: AnswerKind) -> None:
    driver = FakeDriver(refusals={"Checkpoint": [code]})
    assert transitions.swap_out(driver, TGID, 100).kind is kind
    assert driver.now is CheckpointState.RUNNING


GIB = 1 << 30
GPU, OTHER_GPU = "GPU-a", "GPU-b"


@dataclass
class FakeNvml:
    """GPUs: how much is free on each, and what the processes there hold."""

    free: dict[str, int | None]
    used: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    lists: bool = True

    def devices(self) -> tuple[Any, ...]:
        return tuple(SimpleNamespace(uuid=uuid) for uuid in self.free)

    def processes(self, device: Any) -> list[tuple[int, int | None]]:
        return self.used.get(device.uuid, [])

    def lists_processes(self, _device: Any) -> bool:
        return self.lists

    def free_bytes(self, device: Any) -> int | None:
        return self.free[device.uuid]


def checked(driver: FakeDriver, nvml: FakeNvml, needs: dict[str, int] | None) -> RoomChecked:
    return RoomChecked(driver, NvmlMemory(lambda: cast(Any, nvml)), needs)


@pytest.mark.parametrize(
    ("needs", "free", "used", "fits"),
    [
        ({GPU: 10 * GIB}, {GPU: 20 * GIB}, [(1, GIB)], True),
        ({GPU: 10 * GIB}, {GPU: 9 * GIB}, [(1, GIB)], False),
        ({GPU: 10 * GIB}, {GPU: 10 * GIB + 1}, [(1, GIB)], False),  # others may allocate, and it takes a little more
        ({GPU: 10 * GIB}, {GPU: 10 * GIB + 1}, [], True),  # there will never be more room
        ({GPU: 10 * GIB}, {GPU: 9 * GIB}, [], False),
        ({GPU: 10 * GIB, OTHER_GPU: GIB}, {GPU: 20 * GIB, OTHER_GPU: 0}, [], False),
        ({GPU: 10 * GIB}, {OTHER_GPU: 20 * GIB}, [], False),  # it is not there
        ({GPU: 10 * GIB}, {GPU: None}, [], False),
        ({}, {GPU: 0}, [(1, GIB)], True),
        (None, {GPU: 20 * GIB}, [(1, GIB)], False),
        (None, {GPU: 20 * GIB}, [], True),
    ],
)
def test_a_restore_is_tried_only_where_there_is_room(
    needs: dict[str, int] | None, free: dict[str, int | None], used: list[tuple[int, int | None]], fits: bool
) -> None:
    driver = FakeDriver(CheckpointState.CHECKPOINTED)
    answer = transitions.release(checked(driver, FakeNvml(free, {GPU: used}), needs), TGID)
    assert (answer.kind is AnswerKind.DONE) == fits
    assert ("Restore" in driver.calls) == fits
    assert driver.now is (CheckpointState.RUNNING if fits else CheckpointState.CHECKPOINTED)
    assert fits or "tried again" in (answer.error or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hold others up")
def test_two_restores_do_not_count_on_the_same_room() -> None:
    nvml, begun, go_on = FakeNvml({GPU: 10 * GIB}, {GPU: [(1, GIB)]}), threading.Event(), threading.Event()

    class Slow(FakeDriver):
        def restore(self, tgid: int) -> None:
            begun.set()
            assert go_on.wait(60)
            nvml.free[GPU] = 2 * GIB
            super().restore(tgid)

    with ThreadPoolExecutor(2) as pool:
        needs = {GPU: 8 * GIB}
        first = pool.submit(transitions.release, checked(Slow(CheckpointState.CHECKPOINTED), nvml, needs), TGID)
        assert begun.wait(60)
        second = pool.submit(transitions.release, checked(FakeDriver(CheckpointState.CHECKPOINTED), nvml, needs), TGID)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        go_on.set()
        assert first.result(60).kind is AnswerKind.DONE
        assert second.result(60).kind is AnswerKind.NO_ROOM


def test_what_has_allocated_since_its_entry_was_written_is_not_saved() -> None:
    nvml = FakeNvml({GPU: 0}, {GPU: [(TGID, 2 * GIB), (1, GIB)]})
    driver = FakeDriver()
    assert transitions.swap_out(checked(driver, nvml, {GPU: GIB}), TGID, 100).kind is AnswerKind.BUSY
    assert (driver.now, driver.calls) == (CheckpointState.RUNNING, ["Lock", "Unlock"])
    assert transitions.swap_out(checked(driver, nvml, {GPU: 2 * GIB}), TGID, 100).kind is AnswerKind.DONE
    assert driver.now is CheckpointState.CHECKPOINTED


def test_how_much_a_process_holds_is_known_or_an_error() -> None:
    used: list[tuple[int, int | None]] = [(TGID, GIB), (1, None)]
    assert NvmlMemory(lambda: cast(Any, FakeNvml({GPU: 0, OTHER_GPU: 0}, {GPU: used}))).held(TGID) == {GPU: GIB}
    assert NvmlMemory(lambda: cast(Any, FakeNvml({GPU: 0}, {GPU: used}))).held(2) == {}
    for nvml in (FakeNvml({GPU: 0}, {GPU: [(TGID, None)]}), FakeNvml({GPU: 0}, lists=False)):
        with pytest.raises(SetupError, match="NVML does not"):
            NvmlMemory(lambda nvml=nvml: cast(Any, nvml)).held(TGID)  # type: ignore[misc]


def test_a_lock_that_does_not_come_in_time_is_reported() -> None:
    driver = FakeDriver(refusals={"Lock": [codes.NOT_READY]})
    answer = transitions.lock(driver, TGID, 100)
    assert answer.kind is AnswerKind.BUSY
    assert "CUDA_ERROR_NOT_READY" in (answer.error or "")


@given(st.sampled_from([CheckpointState.RUNNING, CheckpointState.LOCKED, CheckpointState.CHECKPOINTED]))
def test_release_ends_at_running_from_whatever_state(now: CheckpointState) -> None:
    driver = FakeDriver(now)
    assert transitions.release(driver, TGID) == HelperAnswer(AnswerKind.DONE, now, CheckpointState.RUNNING)
    assert driver.now is CheckpointState.RUNNING


@given(
    st.sampled_from(CheckpointState),
    st.dictionaries(st.sampled_from(["Restore", "Unlock"]), st.lists(st.integers(1, 999))),
)
def test_release_reports_done_only_when_the_process_runs(now: CheckpointState, refusals: dict[str, list[int]]) -> None:
    driver = FakeDriver(now, refusals)
    answer = transitions.release(driver, TGID)
    assert (answer.kind is AnswerKind.DONE) == (driver.now is CheckpointState.RUNNING)


def test_a_checkpoint_that_ends_under_the_hands_of_release_is_restored() -> None:
    driver = FakeDriver(CheckpointState.LOCKED, {"Unlock": [codes.ILLEGAL_STATE]})
    driver.becomes = [CheckpointState.LOCKED, CheckpointState.CHECKPOINTED]
    assert transitions.release(driver, TGID).kind is AnswerKind.DONE
    assert driver.calls == ["Unlock", "Restore", "Unlock"]


def test_a_lock_that_comes_late_is_waited_for_and_undone() -> None:
    clock, driver = SleepClock(), FakeDriver()
    driver.becomes = [CheckpointState.RUNNING, CheckpointState.RUNNING, CheckpointState.LOCKED]
    answer = transitions.release(driver, TGID, 1.0, clock, clock.sleep)
    assert answer == HelperAnswer(AnswerKind.DONE, CheckpointState.LOCKED, CheckpointState.RUNNING)
    assert driver.calls == ["Unlock"]
    assert 0 < clock.now < 1.0


def test_what_stays_running_is_watched_no_longer_than_it_has_to() -> None:
    clock = SleepClock()
    assert transitions.release(FakeDriver(), TGID, 0.5, clock, clock.sleep).before is CheckpointState.RUNNING
    assert 0.5 <= clock.now < 0.6


@given(answers)
def test_the_helpers_answer_is_understood(answer: HelperAnswer) -> None:
    assert parse_answer(answer.to_line()) == answer


MALFORMED = (
    *("[]", "{}", "3", "[" * 5000, '{"kind": "done", "before": "up"}', '{"kind": 1}'),
    '{"kind": "done", "held": {"GPU-a": Infinity}}',
)


@given(st.text() | st.sampled_from(MALFORMED))
def test_a_helper_that_prints_anything_else_has_failed(line: str) -> None:
    assert parse_answer(line).kind in (AnswerKind.FAILED,)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (HelperAnswer(AnswerKind.DONE, CheckpointState.LOCKED, CheckpointState.RUNNING), UndoOutcome.RESUMED),
        (HelperAnswer(AnswerKind.DONE, CheckpointState.RUNNING, CheckpointState.RUNNING), UndoOutcome.RUNNING),
        (HelperAnswer(AnswerKind.GONE), UndoOutcome.GONE),
        (HelperAnswer(AnswerKind.NO_CUDA), UndoOutcome.RUNNING),
    ],
)
def test_what_release_found_closes_the_entry(
    answer: HelperAnswer, outcome: UndoOutcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(helper, "ask", lambda *_: answer)
    assert helper.release_process(entry_of(proc_with(tmp_path)), Procfs(str(tmp_path))) is outcome


@pytest.mark.parametrize(
    "kind",
    [
        AnswerKind.NO_ROOM,
        AnswerKind.STOPPED,
        AnswerKind.BUSY,
        AnswerKind.TIMEOUT,
        AnswerKind.NO_DRIVER,
        AnswerKind.FAILED,
    ],
)
def test_what_is_not_released_stays_in_the_ledger(
    kind: AnswerKind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(helper, "ask", lambda *_: HelperAnswer(kind))
    with pytest.raises(helper.CheckpointError):
        helper.release_process(entry_of(proc_with(tmp_path)), Procfs(str(tmp_path)))


def test_the_helper_is_told_what_the_process_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []

    def ask(*words: Any) -> HelperAnswer:
        said.extend(word for word in words if isinstance(word, str))
        return HelperAnswer(AnswerKind.DONE)

    monkeypatch.setattr(helper, "ask", ask)
    entry = entry_of(proc_with(tmp_path))
    helper.release_process(entry, Procfs(str(tmp_path)))
    assert not any(word.startswith("--needs") for word in said)
    helper.release_process(replace(entry, device_bytes=((GPU, GIB),)), Procfs(str(tmp_path)))
    assert f'--needs={{"{GPU}": {GIB}}}' in said


def test_a_lock_without_an_answer_is_waited_for_however_old_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []

    def ask(*words: Any) -> HelperAnswer:
        said.extend(word for word in words if isinstance(word, str) and word.startswith("--settle-ms"))
        return HelperAnswer(AnswerKind.DONE, CheckpointState.RUNNING, CheckpointState.RUNNING)

    monkeypatch.setattr(helper, "ask", ask)
    process, procfs = proc_with(tmp_path), Procfs(str(tmp_path))
    long_ago = entry_of(process)
    for change in (helper.about_to_act, helper.unanswered, helper.acted):
        change(process)
        helper.release_process(long_ago, procfs)
    assert said == ["--settle-ms=0", f"--settle-ms={helper.LOCK_LIMIT_MS + 1000}", "--settle-ms=0"]
    helper.about_to_act(process)


def test_a_lock_without_an_answer_is_ours_and_waited_for_whatever_the_next_helper_sees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    answers = [HelperAnswer(AnswerKind.STOPPED), HelperAnswer(AnswerKind.DONE, CheckpointState.LOCKED)]

    def ask(*words: Any) -> HelperAnswer:
        said.extend(word for word in words if isinstance(word, str) and word.startswith("--settle-ms"))
        return answers.pop(0)

    monkeypatch.setattr(helper, "ask", ask)
    process, procfs = proc_with(tmp_path), Procfs(str(tmp_path))
    helper.unanswered(process)  # it was stopped, say by a debugger, when the lock was asked for
    helper.about_to_act(process)
    helper.acted(process, foreign=True)  # the late lock, as the next helper sees it
    with pytest.raises(helper.CheckpointError):
        helper.release_process(entry_of(process), procfs)
    assert helper.release_process(entry_of(process), procfs) is UndoOutcome.RESUMED
    assert said == [f"--settle-ms={helper.LOCK_LIMIT_MS + 1000}"] * 2
    helper.about_to_act(process)


def test_another_process_under_the_pid_is_not_asked_about(tmp_path: Path) -> None:
    proc_with(tmp_path)
    with pytest.raises(GoneError):
        check_identity(ProcessId(TGID, 1), Procfs(str(tmp_path)))


@pytest.mark.parametrize(
    ("state", "cgroup", "file", "text", "held"),
    [
        ("T", "0::/a\n", "a/cgroup.events", "frozen 0\n", "it is stopped"),
        ("t", "0::/a\n", "a/cgroup.events", "frozen 0\n", "it is stopped"),
        ("S", "0::/a\n", "a/cgroup.events", "populated 1\nfrozen 1\n", "its cgroup is frozen"),
        ("S", "0::/a\n", "unified/a/cgroup.events", "populated 1\nfrozen 1\n", "its cgroup is frozen"),
        ("D", "4:freezer:/b\n0::/a\n", "freezer/b/freezer.state", "FROZEN\n", "its cgroup is frozen"),
        ("S", "4:freezer:/b\n0::/a\n", "freezer/b/freezer.state", "THAWED\n", None),
        ("R", "0::/a\n", "a/cgroup.events", "populated 1\nfrozen 0\n", None),
        ("R", "0::/elsewhere\n", "a/cgroup.events", "frozen 1\n", None),
    ],
)
def test_the_reason_why_a_process_does_not_run_is_reported(
    state: str, cgroup: str, file: str, text: str, held: str | None, tmp_path: Path
) -> None:
    proc_with(tmp_path / "proc", state, cgroup)
    place = tmp_path / "cgroup" / file
    place.parent.mkdir(parents=True)
    place.write_text(text)
    assert reason_not_running(TGID, Procfs(str(tmp_path / "proc")), tmp_path / "cgroup") == held


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, 100 << 10),
        ({"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 100 << 10),
        ({"a/b/memory.max": "5000\n", "a/b/memory.current": "1000\n"}, 4000),
        ({"a/b/memory.max": "5000\n", "a/b/memory.current": "6000\n"}, 0),
        ({"a/memory.max": "5000\n", "a/memory.current": "1000\n"}, 4000),  # of its pod
        (
            {
                "a/b/memory.max": "5000\n",
                "a/b/memory.current": "4000\n",
                "a/b/memory.stat": "anon 1\ninactive_file 2500\nactive_file 9\n",
            },
            3500,
        ),
        ({"memory/a/b/memory.limit_in_bytes": "5000\n", "memory/a/b/memory.usage_in_bytes": "2000\n"}, 3000),
    ],
)
def test_the_room_is_the_least_that_the_host_and_the_cgroups_leave(
    files: dict[str, str], room: int, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 50 kB\nMemAvailable: 100 kB\n")
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    assert room_bytes("/a/b", tmp_path / "cgroup", tmp_path / "meminfo") == room


def test_a_room_that_is_not_reported_is_unknown(tmp_path: Path) -> None:
    assert room_bytes("/a", tmp_path, tmp_path / "meminfo") is None


def proc_with(root: Path, state: str = "S", cgroup: str = "0::/\n") -> ProcessId:
    folder = root / str(TGID)
    folder.mkdir(parents=True)
    fields = [state, "1"] + ["0"] * 15 + ["1", "0", "777"]
    (folder / "stat").write_text(f"{TGID} (train) {' '.join(fields)}\n")
    (folder / "cgroup").write_text(cgroup)
    return ProcessId(TGID, 777)


def entry_of(process: ProcessId) -> LedgerEntry:
    return LedgerEntry.of("swap", process, ContainerKey("docker:abc"), 0, "/usr/lib/libcuda.so.1")


class Present(DriverLibrary):
    """A node with a driver."""

    def path(self) -> str:
        return "/usr/lib64/libcuda.so.1"


def test_our_own_freeze_is_no_obstacle_and_another_writers_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rungs, "reason_not_running", lambda *_: "its cgroup is frozen")
    key = ContainerKey("c:training")
    subject = Subject(Container(key, "training", "runc"), (ProcessId(TGID, 1),), frozenset(), None)  # type: ignore[arg-type]
    ledger = Ledger(tmp_path / "ledger")
    checkpoints = Checkpoints(ledger, Present())
    other = LedgerEntry.at("freeze", "v2:1:/other", ContainerKey("c:other"), 1)
    ledger.intend(other)
    assert checkpoints.obstacle(subject) == f"process {TGID}: its cgroup is frozen"
    ours = LedgerEntry.at("freeze", "v2:2:/training", key, 1)
    ledger.intend(ours)
    assert checkpoints.obstacle(subject) is None
    ledger.done(ours.id)
    assert checkpoints.obstacle(subject) == f"process {TGID}: its cgroup is frozen"
    assert Checkpoints(None, Present()).obstacle(subject) == f"process {TGID}: its cgroup is frozen"


def subject_of(*processes: ProcessId) -> Subject:
    key = ContainerKey("c:training")
    return Subject(Container(key, "training", "runc"), processes, frozenset(), None)  # type: ignore[arg-type]


def test_a_process_without_an_entry_is_not_locked_though_it_uses_cuda_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = ProcessId(TGID, 1), ProcessId(TGID + 1, 1)
    asked: list[tuple[str, ProcessId]] = []

    def ask(act: str, process: ProcessId, *_: str) -> HelperAnswer:
        asked.append((act, process))
        if act in ("state", "held"):
            return HelperAnswer(
                AnswerKind.NO_CUDA if process == newer else AnswerKind.DONE, after=CheckpointState.RUNNING
            )
        return HelperAnswer(AnswerKind.DONE, CheckpointState.RUNNING, CheckpointState.LOCKED)

    monkeypatch.setattr(rungs, "ask", ask)
    ledger = Ledger(tmp_path / "ledger")
    lock = rungs.Lock(Checkpoints(ledger, Present(), Procfs(str(tmp_path))))
    for entry in lock.intents(subject_of(older, newer)):
        ledger.intend(entry)
    lock.apply(subject_of(older, newer))
    assert [process for act, process in asked if act == "lock"] == [older]


def test_what_uses_cuda_only_once_the_others_are_locked_gets_no_entry_that_nothing_would_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = ProcessId(TGID, 1), ProcessId(TGID + 1, 1)
    monkeypatch.setattr(
        rungs, "ask", lambda *_: HelperAnswer(AnswerKind.DONE, after=CheckpointState.RUNNING, held={GPU: GIB})
    )
    ledger = Ledger(tmp_path / "ledger")
    ledger.intend(LedgerEntry.of("swap", older, ContainerKey("c:training"), 0, "/usr/lib/libcuda.so.1"))
    Checkpoints(ledger, Present(), Procfs(str(tmp_path))).note_held(subject_of(older, newer))
    assert [(entry.process, entry.device_bytes) for entry in ledger.outstanding()] == [(older, ((GPU, GIB),))]


def test_a_ledger_that_cannot_be_read_is_an_obstacle_and_no_failed_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked(Ledger):
        def outstanding(self) -> list[LedgerEntry]:
            raise LedgerError("another process holds the ledger")

    monkeypatch.setattr(rungs, "reason_not_running", lambda *_: "its cgroup is frozen")
    checkpoints = Checkpoints(Locked(tmp_path / "ledger"), Present())
    assert checkpoints.obstacle(subject_of(ProcessId(TGID, 1))) == "another process holds the ledger"


def test_that_there_is_no_driver_is_believed_for_a_minute(tmp_path: Path) -> None:
    looked: list[int] = []
    now = [0]
    there: list[str] = []

    def find(_extra: object) -> list[str]:
        looked.append(now[0])
        return there

    library = DriverLibrary(find=find, clock=lambda: now[0])
    for second in range(59):
        now[0] = second * 10**9
        with pytest.raises(SetupError, match="no libcuda"):
            library.path()
    assert looked == [0]
    broken = tmp_path / "libcuda.so.1"
    broken.write_text("no library")
    there.append(str(broken))
    for second in (60, 61, 119):
        now[0] = second * 10**9
        with pytest.raises(SetupError, match=str(broken)):
            library.path()
    assert looked == [0, 60 * 10**9]


def test_a_helper_starts_without_what_finds_driver_libraries() -> None:
    program = "import sys, enforce.actuators.checkpoint.__main__; sys.exit('agent.probes.discovery' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0
