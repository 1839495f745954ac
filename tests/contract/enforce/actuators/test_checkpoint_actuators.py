# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`lock` and `swap` on real processes of a simulated GPU: done, refused, undone from the ledger whatever dies."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint import helper
from enforce.actuators.checkpoint.driver import AnswerKind, CheckpointState, Cuda
from enforce.actuators.checkpoint.helper import CheckpointError, DriverLibrary, ask
from enforce.actuators.checkpoint.rungs import Checkpoints, Lock, Swap
from enforce.actuators.executor import RungExecutor, Wanted
from enforce.actuators.undo import MadeBy, acts_where, keep_releasing, release_all
from enforce.ledger.entries import UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import Subject
from tests.support.programs.checkpoint_agent import KEY, LIBCUDA, subject_of
from tools.harness.cgroups import hierarchies
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.wait import until

GIB = 1 << 30
DEADLINE_SECONDS = 60.0
SHORT = ["--kernels", "20", "--kernel-us", "200", "--blocks", "66"]
LONG = ["--kernels", "1", "--kernel-us", "300000", "--blocks", "66"]


@dataclass(frozen=True)
class Stage:
    """A node with one GPU of 8 GiB, a ledger, and the rungs."""

    node: Node
    path: Path
    ledger: Ledger
    checkpoints: Checkpoints

    def offline(self, *arguments: str) -> int:
        process = self.node.start("offline", ["--seconds", "0", *arguments])
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        until(lambda: self.launches(process.pid), "the first launch")
        return process.pid

    def launches(self, tgid: int) -> int:
        return sum(entry["launches"] for entry in self.node.truth() if entry["pid"] == tgid)

    def goes_on(self, tgid: int) -> None:
        before = self.launches(tgid)
        until(lambda: self.launches(tgid) > before + 2, "more launches")

    def used_bytes(self) -> int:
        return int(self.node.status()[0]["memory_used"])

    def climb(self, rung: Lock | Swap, subject: Subject) -> None:
        assert rung.obstacle(subject) is None
        for entry in rung.intents(subject):
            self.ledger.intend(entry)
        rung.apply(subject)

    def lock(self, subject: Subject) -> None:
        self.climb(Lock(self.checkpoints), subject)

    def swap(self, subject: Subject) -> None:
        self.climb(Swap(self.checkpoints), subject)

    def release(self) -> list[UndoOutcome]:
        return [one.outcome for one in release_all(self.path)]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with simulated_node(tmp_path / "gpu", {"memory": "8GiB"}) as node:
        for name, value in node.environment.items():
            if name != "LD_LIBRARY_PATH":  # the helper gets the library's path
                monkeypatch.setenv(name, value)
        path = tmp_path / "ledger.jsonl"
        ledger = Ledger(path)
        yield Stage(node, path, ledger, Checkpoints(ledger, DriverLibrary((LIBCUDA,))))
        ledger.close()


def state_of(tgid: int) -> CheckpointState | None:
    return ask("state", Procfs().process_id(tgid), LIBCUDA).after


def test_a_locked_container_launches_nothing_and_goes_on_when_released(stage: Stage) -> None:
    tgids = [stage.offline(*SHORT), stage.offline(*SHORT)]
    stage.lock(subject_of(*tgids))
    assert [state_of(tgid) for tgid in tgids] == [CheckpointState.LOCKED] * 2
    before = [stage.launches(tgid) for tgid in tgids]
    time.sleep(0.2)
    assert [stage.launches(tgid) for tgid in tgids] == before
    assert len(read(stage.path)) == 2
    assert stage.release() == [UndoOutcome.RESUMED] * 2
    assert read(stage.path) == []
    for tgid in tgids:
        stage.goes_on(tgid)


@pytest.fixture
def nvml(stage: Stage) -> Iterator[Any]:
    # Once a library of this soname is loaded, pynvml's own loading finds it.
    ctypes.CDLL(str(BUILD / "lib" / "libnvidia-ml.so.1"))
    pynvml.nvmlInit()
    yield pynvml
    pynvml.nvmlShutdown()


def test_a_swapped_container_leaves_the_device_to_others_and_comes_back(stage: Stage, nvml: Any) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(5 * GIB))
    handle = nvml.nvmlDeviceGetHandleByIndex(0)

    def listed() -> set[int]:
        return {entry.pid for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}

    assert listed() == {tgid}
    stage.swap(subject_of(tgid))
    assert listed() == set()
    assert stage.used_bytes() == 0
    other = stage.offline(*SHORT, "--memory", str(5 * GIB))
    assert stage.release() == [UndoOutcome.FAILED]  # no room
    assert len(read(stage.path)) == 1
    assert state_of(tgid) is CheckpointState.CHECKPOINTED
    stage.goes_on(other)
    os.kill(other, signal.SIGKILL)
    until(lambda: stage.used_bytes() == 0, "all GPU memory to be free")
    assert stage.release() == [UndoOutcome.RESUMED]
    assert read(stage.path) == []
    assert listed() == {tgid}
    stage.goes_on(tgid)


def test_a_lock_outlives_the_guardian_while_the_agent_lives(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    stage.lock(subject_of(tgid))
    assert release_all(stage.path, acts=acts_where(MadeBy.KERNEL)) == []
    assert state_of(tgid) is CheckpointState.LOCKED
    assert stage.release() == [UndoOutcome.RESUMED]


def test_what_has_no_room_is_tried_again_until_there_is(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(5 * GIB))
    stage.swap(subject_of(tgid))
    other = stage.offline(*SHORT, "--memory", str(5 * GIB))
    [released] = release_all(stage.path)
    assert "tried again" in (released.error or "")
    assert keep_releasing(stage.path, [released], limit_seconds=0.3, every_seconds=0.1) == [released]
    os.kill(other, signal.SIGKILL)
    assert keep_releasing(stage.path, [released], limit_seconds=DEADLINE_SECONDS, every_seconds=0.1) == []
    assert read(stage.path) == []
    stage.goes_on(tgid)


def test_a_process_that_the_driver_restores_no_more_is_reported_until_it_has_ended(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(5 * GIB))
    stage.swap(subject_of(tgid))
    [entry] = read(stage.path)
    assert entry.device_bytes is not None
    assert 5 * GIB < entry.device_bytes[0][1] < 6 * GIB
    other = stage.offline(*SHORT, "--memory", str(5 * GIB))
    stage.ledger.intend(replace(entry, device_bytes=()))  # as if the other one had come after the look for room
    [released] = release_all(stage.path)
    assert "OUT_OF_MEMORY" in (released.error or "")
    os.kill(other, signal.SIGKILL)
    until(lambda: stage.used_bytes() == 0, "all GPU memory to be free")
    [released] = release_all(stage.path)
    assert released.outcome is UndoOutcome.FAILED
    assert "end the process" in (released.error or "")
    assert len(read(stage.path)) == 1
    os.kill(tgid, signal.SIGKILL)
    until(lambda: Procfs().stat(tgid).dead, "the process to be dead")
    assert stage.release() == [UndoOutcome.GONE]


def test_what_a_process_holds_is_noted_once_it_can_allocate_no_more(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(GIB))
    rung, subject = Swap(stage.checkpoints), subject_of(tgid)
    [entry] = rung.intents(subject)
    stage.ledger.intend(replace(entry, device_bytes=()))  # as if it had allocated all of it since then
    rung.apply(subject)
    [noted] = read(stage.path)
    assert noted.device_bytes == entry.device_bytes
    rung.apply(subject)  # as is done again and again
    assert read(stage.path) == [noted]
    assert state_of(tgid) is CheckpointState.CHECKPOINTED
    assert stage.release() == [UndoOutcome.RESUMED]
    stage.goes_on(tgid)


def test_a_lock_beneath_a_swap_is_undone_with_it(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(GIB))
    other = stage.offline(*SHORT)  # so that nothing is restored whose needs are unknown
    stage.lock(subject_of(tgid))
    stage.swap(subject_of(tgid))
    assert stage.release() == [UndoOutcome.RESUMED, UndoOutcome.RUNNING]
    stage.goes_on(tgid)
    stage.goes_on(other)


def test_what_a_later_agent_intends_again_is_not_undone_by_an_earlier_ones_guardian(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(5 * GIB))
    stage.swap(subject_of(tgid))
    other = stage.offline(*SHORT, "--memory", str(5 * GIB))
    [released] = release_all(stage.path)
    stage.swap(subject_of(tgid))  # it is ours already, and wanted again
    os.kill(other, signal.SIGKILL)
    until(lambda: stage.used_bytes() == 0, "all GPU memory to be free")
    assert keep_releasing(stage.path, [released], limit_seconds=DEADLINE_SECONDS, every_seconds=0.1) == []
    assert state_of(tgid) is CheckpointState.CHECKPOINTED
    assert stage.release() == [UndoOutcome.RESUMED]


def want(rungs: RungExecutor, wanted: Wanted, name: str) -> bool:
    rungs.want(wanted)
    return name in rungs.in_force(KEY)


def test_the_rungs_climb_to_swap_and_back(stage: Stage) -> None:
    tgid = stage.offline(*SHORT, "--memory", str(GIB))
    rungs = RungExecutor({"swap": Swap(stage.checkpoints)}, stage.ledger)
    wanted = {KEY: (subject_of(tgid), frozenset({"swap"}))}
    until(lambda: want(rungs, wanted, "swap"), "the rung in force")
    assert state_of(tgid) is CheckpointState.CHECKPOINTED
    until(lambda: not want(rungs, {}, "swap"), "the rung undone")
    assert state_of(tgid) is CheckpointState.RUNNING
    rungs.release_all()
    assert read(stage.path) == []
    stage.goes_on(tgid)


def test_swap_takes_over_what_lock_holds_already(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    stage.lock(subject_of(tgid))
    stage.swap(subject_of(tgid))
    assert state_of(tgid) is CheckpointState.CHECKPOINTED
    assert set(stage.release()) <= {UndoOutcome.RESUMED, UndoOutcome.RUNNING}
    assert read(stage.path) == []
    stage.goes_on(tgid)


def test_what_another_program_has_locked_is_left_alone(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    process = Procfs().process_id(tgid)
    assert ask("lock", process, LIBCUDA).kind is AnswerKind.DONE
    for rung in (Lock(stage.checkpoints), Swap(stage.checkpoints)):
        with pytest.raises(CheckpointError, match="by another program"):
            rung.intents(subject_of(tgid))
    assert ask("swap-out", process, LIBCUDA).kind is AnswerKind.FOREIGN
    assert stage.release() == []
    assert state_of(tgid) is CheckpointState.LOCKED
    assert ask("unlock", process, LIBCUDA).kind is AnswerKind.DONE


def test_a_lock_that_another_program_takes_in_between_is_not_undone(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    rung, subject = Lock(stage.checkpoints), subject_of(tgid)
    for entry in rung.intents(subject):
        stage.ledger.intend(entry)
    assert ask("lock", subject.processes[0], LIBCUDA).kind is AnswerKind.DONE
    with pytest.raises(CheckpointError, match="by another program"):
        rung.apply(subject)
    assert stage.release() == [UndoOutcome.RUNNING]
    assert state_of(tgid) is CheckpointState.LOCKED


def test_an_mps_client_is_refused_and_remembered(stage: Stage) -> None:
    with stage.node.mps_daemon():
        tgid = stage.offline(*SHORT)
        with pytest.raises(CheckpointError, match="NOT_SUPPORTED"):
            stage.swap(subject_of(tgid))
        obstacle = Swap(stage.checkpoints).obstacle(subject_of(tgid))
        assert obstacle is not None
        assert "MPS client" in obstacle
        assert stage.release() == [UndoOutcome.RUNNING]
        stage.goes_on(tgid)


def test_a_stopped_process_is_refused_and_stays_as_it_was(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    os.kill(tgid, signal.SIGSTOP)
    until(lambda: Procfs().stat(tgid).state == "T", "the process to be stopped")
    with pytest.raises(CheckpointError, match="it is stopped"):
        stage.lock(subject_of(tgid))
    assert stage.release() == [UndoOutcome.FAILED]  # nor can it be asked whether there is something to undo
    os.kill(tgid, signal.SIGCONT)
    assert stage.release() == [UndoOutcome.RUNNING]
    assert Procfs().stat(tgid).state != "T"
    stage.goes_on(tgid)


def test_a_lock_of_a_process_that_is_stopped_meanwhile_ends_by_its_limit_and_is_undone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(helper._LIMITS_SECONDS, "lock", 4.0)
    tgid = stage.offline("--kernels", "1", "--kernel-us", "1500000", "--blocks", "66")
    driver, rung, subject = Cuda(LIBCUDA), Lock(stage.checkpoints), subject_of(tgid)
    for entry in rung.intents(subject):
        stage.ledger.intend(entry)
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(rung.apply, subject)
        until(lambda: driver.state(tgid) is CheckpointState.LOCKED, "the lock to wait for the kernel")
        os.kill(tgid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match="did not return in time"):
            applied.result()
    assert stage.release() == [UndoOutcome.FAILED]  # it is stopped
    os.kill(tgid, signal.SIGCONT)
    assert stage.release() == [UndoOutcome.RESUMED]
    stage.goes_on(tgid)


def test_a_process_that_runs_only_for_moments_can_be_locked(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    pacing = subprocess.Popen(
        ["sh", "-c", f"while :; do kill -STOP {tgid} || exit; sleep 0.05; kill -CONT {tgid}; sleep 0.05; done"]
    )
    try:
        stage.lock(subject_of(tgid))
    finally:
        pacing.kill()
        pacing.wait()
        os.kill(tgid, signal.SIGCONT)
    assert state_of(tgid) is CheckpointState.LOCKED
    assert stage.release() == [UndoOutcome.RESUMED]
    stage.goes_on(tgid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")
def test_a_frozen_container_is_an_obstacle(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    freezer = next(
        (root for root in hierarchies() if root.name == "freezer" or (root / "cgroup.controllers").exists()), None
    )
    if freezer is None:
        pytest.skip("no freezer here")
    cgroup = freezer / f"gpuwarden-test-{tgid}"
    cgroup.mkdir()
    file, frozen, thawed = (
        ("freezer.state", "FROZEN", "THAWED") if freezer.name == "freezer" else ("cgroup.freeze", "1", "0")
    )
    try:
        (cgroup / "cgroup.procs").write_text(str(tgid))
        (cgroup / file).write_text(frozen)
        obstacle = until(lambda: Lock(stage.checkpoints).obstacle(subject_of(tgid)), "an obstacle")
        assert "frozen" in obstacle
        (cgroup / file).write_text(thawed)
        until(lambda: Lock(stage.checkpoints).obstacle(subject_of(tgid)) is None, "no obstacle")
        stage.lock(subject_of(tgid))
        assert stage.release() == [UndoOutcome.RESUMED]
    finally:
        (cgroup / file).write_text(thawed)
        os.kill(tgid, signal.SIGKILL)
        until(lambda: not (cgroup / "cgroup.procs").read_text().strip(), "the cgroup to be empty")
        cgroup.rmdir()


def test_a_driver_without_the_calls_is_an_obstacle(stage: Stage, tmp_path: Path) -> None:
    old = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", old], input="int cuInit;", text=True, check=True)
    tgid = stage.offline(*SHORT)
    checkpoints = Checkpoints(stage.ledger, DriverLibrary((str(old),), find=lambda extra: list(extra)))
    for rung in (Lock(checkpoints), Swap(checkpoints)):
        assert "driver R570 or newer is needed" in (rung.obstacle(subject_of(tgid)) or "")
    answer = ask("lock", Procfs().process_id(tgid), str(old))
    assert answer.kind is AnswerKind.NO_DRIVER
    assert "driver R570 or newer is needed" in (answer.error or "")


def test_a_node_without_a_driver_is_an_obstacle(stage: Stage) -> None:
    checkpoints = Checkpoints(stage.ledger, DriverLibrary(find=lambda extra: []))
    assert "no libcuda.so.1" in (Lock(checkpoints).obstacle(subject_of(os.getpid())) or "")


def test_a_host_without_room_is_an_obstacle_to_swap_alone(stage: Stage) -> None:
    subject = subject_of(os.getpid())
    swap = Swap(stage.checkpoints, device_bytes=lambda _: 10 * GIB, host_bytes=lambda _: 8 * GIB)
    assert "8.0 GiB left for the 10.0 GiB" in (swap.obstacle(subject) or "")
    assert Lock(stage.checkpoints).obstacle(subject) is None
    assert Swap(stage.checkpoints, device_bytes=lambda _: GIB, host_bytes=lambda _: 8 * GIB).obstacle(subject) is None


def test_another_process_under_the_same_pid_is_never_touched(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    stranger = ProcessId(tgid, Procfs().process_id(tgid).start_ticks + 1)
    for act in ("lock", "swap-out", "release"):
        assert ask(act, stranger, LIBCUDA).kind is AnswerKind.GONE
    assert state_of(tgid) is CheckpointState.RUNNING


def test_a_process_that_dies_while_it_is_locked_closes_its_entry(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    stage.swap(subject_of(tgid))
    os.kill(tgid, signal.SIGKILL)
    until(lambda: Procfs().stat(tgid).dead, "the process to be dead")
    assert stage.release() == [UndoOutcome.GONE]
    assert read(stage.path) == []


def test_a_program_without_cuda_has_nothing_to_undo(stage: Stage) -> None:
    assert Lock(stage.checkpoints).intents(subject_of(os.getpid())) == []


def test_a_checkpoint_that_fails_is_reported_and_stays_in_the_ledger(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    stage.node.fault("checkpoint-fails", str(tgid))
    with pytest.raises(CheckpointError):
        stage.swap(subject_of(tgid))
    [released] = release_all(stage.path)
    assert released.outcome is UndoOutcome.FAILED
    assert "only ending it is left" in (released.error or "")


def helpers_of(tgid: int, act: str) -> list[int]:
    """The helper programs that act on that process now."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path("/proc", name, "cmdline").read_bytes().split(b"\0") if name.isdecimal() else []
        except OSError:
            continue
        if b"enforce.actuators.checkpoint" in words and act.encode() in words and str(tgid).encode() in words:
            found.append(int(name))
    return found


def helpers_at_work(tgid: int, act: str) -> list[int]:
    """Those that have loaded the driver's library: what follows is its calls."""
    return [helper for helper in helpers_of(tgid, act) if has_driver(helper)]


def has_driver(tgid: int) -> bool:
    try:
        return LIBCUDA in Path(f"/proc/{tgid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("name", "act", "when"),
    [
        ("swap", "swap-out", "intended"),
        ("lock", "lock", "helping"),
        ("swap", "swap-out", "helping"),
        ("swap", "swap-out", "helping, and its helper too"),
        ("swap", "swap-out", "applied"),
    ],
)
def test_whenever_the_agent_is_killed_the_ledger_is_enough(stage: Stage, name: str, act: str, when: str) -> None:
    tgid = stage.offline(*LONG, "--memory", str(GIB))
    agent = subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs.checkpoint_agent", name, str(stage.path), str(tgid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # a line that is there is not hidden from select
        cwd=Path(__file__).parents[4],
    )
    assert agent.stdin
    assert agent.stdout
    assert agent.stdout.readline() == b"intended\n"
    if when.startswith("helping"):
        output = agent.stdout.fileno()  # on a machine that stalls it may be over before we look
        until(
            lambda: helpers_at_work(tgid, act) or select.select([output], [], [], 0)[0], "the helper at work, or done"
        )
        agent.kill()
        for helper in helpers_at_work(tgid, act) if "too" in when else []:
            with suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)
    elif when == "applied":
        assert agent.stdout.readline() == b"applied\n"
    agent.kill()
    agent.wait()
    agent.stdin.close()
    agent.stdout.close()
    assert all(outcome.closed for outcome in stage.release())
    assert read(stage.path) == []
    assert state_of(tgid) is CheckpointState.RUNNING
    assert helpers_of(tgid, act) == []
    stage.goes_on(tgid)


def test_the_command_prints_what_it_did_as_json(stage: Stage) -> None:
    tgid = stage.offline(*SHORT)
    ticks = Procfs().process_id(tgid).start_ticks

    def run(act: str) -> dict[str, str]:
        command = [
            sys.executable,
            "-m",
            "enforce.actuators.checkpoint",
            act,
            "--pid",
            str(tgid),
            "--start-ticks",
            str(ticks),
        ]
        done = subprocess.run([*command, "--library", LIBCUDA], capture_output=True, text=True, timeout=60, check=False)
        answer: dict[str, str] = json.loads(done.stdout)
        assert (done.returncode == 0) == (answer["kind"] == "done"), done.stderr
        return answer

    assert run("state") == {"kind": "done", "before": "running", "after": "running"}
    assert run("swap-out") == {"kind": "done", "before": "running", "after": "checkpointed"}
    assert run("unlock")["kind"] == "foreign"
    assert run("swap-in") == {"kind": "done", "before": "checkpointed", "after": "locked"}
    assert run("unlock") == {"kind": "done", "before": "locked", "after": "running"}
    assert run("lock") == {"kind": "done", "before": "running", "after": "locked"}
    assert run("release") == {"kind": "done", "before": "locked", "after": "running"}
    stage.goes_on(tgid)
