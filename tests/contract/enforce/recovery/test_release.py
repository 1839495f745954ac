# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Release, on real processes: what the ledger names and is stopped runs again, and no other process is touched."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.launch.resume import resume
from enforce.actuators.undo import UNDO, release_all
from enforce.ledger.entries import LedgerEntry, UndoOutcome, intend_line
from enforce.ledger.ledger import Ledger, LedgerError, read
from tools.harness.wait import until

DEADLINE_SECONDS = 10.0
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@dataclass(frozen=True)
class Child:
    """A process that writes one byte when it gets SIGCONT."""

    process: ProcessId
    continued: int  # the reading end

    def was_continued(self, within_seconds: float) -> bool:
        ready, _, _ = select.select([self.continued], [], [], within_seconds)
        return bool(ready) and os.read(self.continued, 1) == b"c"

    def states(self) -> set[str]:
        threads = Procfs(f"/proc/{self.process.tgid}/task")
        return {threads.stat(tid).state for tid in threads.tgids()}

    def stop(self) -> None:
        os.kill(self.process.tgid, signal.SIGSTOP)
        until(lambda: self.states() == {"T"}, "all threads to be stopped")


def live(reported: int, ready: int, threads: int) -> None:
    signal.signal(signal.SIGCONT, lambda *_: os.write(reported, b"c"))
    for _ in range(threads - 1):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    os.write(ready, b"r")
    while True:
        signal.pause()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def fork(threads: int = 1) -> Child:
        continued, reported = os.pipe()
        started, ready = os.pipe()
        tgid = os.fork()
        if tgid == 0:
            try:
                live(reported, ready, threads)
            finally:
                os._exit(1)
        os.close(reported)
        os.close(ready)
        assert os.read(started, 1) == b"r"
        os.close(started)
        children.append(Child(Procfs().process_id(tgid), continued))
        return children[-1]

    yield fork
    for child in children:
        os.close(child.continued)
        with suppress(ProcessLookupError):
            os.kill(child.process.tgid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child.process.tgid, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def intend(path: Path, process: ProcessId, act: str = "pace") -> LedgerEntry:
    entry = LedgerEntry.of(act, process, ContainerKey("docker:abc"), time.time_ns())
    Ledger(path).intend(entry)
    return entry


def outcomes(path: Path, proc_root: str = "/proc") -> list[UndoOutcome]:
    return [one.outcome for one in release_all(path, proc_root)]


def test_a_stopped_process_of_the_ledger_runs_again_and_its_entry_is_closed(
    path: Path, spawn: Callable[..., Child]
) -> None:
    child = spawn()
    intend(path, child.process)
    child.stop()
    assert outcomes(path) == [UndoOutcome.RESUMED]
    assert child.was_continued(DEADLINE_SECONDS)
    until(lambda: child.states() == {"S"}, "the process to run")
    assert read(path) == Ledger(path).outstanding() == []
    assert release_all(path) == []


def test_a_stopped_process_with_many_threads_runs_again(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn(threads=5)
    intend(path, child.process)
    child.stop()
    assert outcomes(path) == [UndoOutcome.RESUMED]
    until(lambda: "T" not in child.states(), "the process to run")


def test_a_running_process_is_not_signalled_and_its_entry_is_closed(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    intend(path, child.process)
    assert outcomes(path) == [UndoOutcome.RUNNING]
    child.stop()
    os.kill(child.process.tgid, signal.SIGCONT)
    assert child.was_continued(DEADLINE_SECONDS)  # ours, just now …
    assert not child.was_continued(0)  # … and none from release, which would have come before it
    assert read(path) == []


def test_a_recycled_pid_is_not_touched(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    intend(path, child.process._replace(start_ticks=child.process.start_ticks - 1))
    child.stop()
    assert outcomes(path) == [UndoOutcome.GONE]
    assert child.states() == {"T"}
    assert read(path) == []


def test_a_process_that_another_program_stopped_and_that_is_not_in_the_ledger_is_not_touched(
    path: Path, spawn: Callable[..., Child]
) -> None:
    ours, theirs = spawn(), spawn()
    intend(path, ours.process)
    ours.stop()
    theirs.stop()
    assert outcomes(path) == [UndoOutcome.RESUMED]
    until(lambda: ours.states() == {"S"}, "our process to run")
    assert theirs.states() == {"T"}


def test_an_entry_of_another_boot_is_of_another_process(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    entry = LedgerEntry.of("pace", child.process, ContainerKey("c"), 0)
    Ledger(path).intend(replace(entry, boot="00000000-0000-0000-0000-000000000000"))
    child.stop()
    assert outcomes(path) == [UndoOutcome.GONE]
    assert child.states() == {"T"}


def test_start_times_of_32_bits_as_the_probes_have_them_are_the_same_process(
    path: Path, spawn: Callable[..., Child]
) -> None:
    child = spawn()
    intend(path, child.process._replace(start_ticks=child.process.start_ticks + (1 << 32)))
    child.stop()
    assert outcomes(path) == [UndoOutcome.RESUMED]


def test_a_process_that_ended_is_gone_before_and_after_it_is_reaped(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    os.kill(child.process.tgid, signal.SIGKILL)
    until(lambda: child.states() == {"Z"}, "the process to be dead")
    intend(path, child.process)
    assert outcomes(path) == [UndoOutcome.GONE]
    intend(path, child.process)
    os.waitpid(child.process.tgid, 0)
    assert outcomes(path) == [UndoOutcome.GONE]
    assert read(path) == []


def test_a_pid_that_is_a_threads_now_is_not_touched(path: Path) -> None:
    finish = threading.Event()
    thread = threading.Thread(target=finish.wait)
    thread.start()
    assert thread.native_id is not None
    intend(path, ProcessId(thread.native_id, 1))
    assert outcomes(path) == [UndoOutcome.GONE]
    finish.set()
    thread.join()


def test_a_traced_process_is_left_alone_and_its_entry_stays(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(PTRACE_ATTACH, child.process.tgid, None, None) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(child.process.tgid, os.WUNTRACED)
    entry = intend(path, child.process)
    assert child.states() == {"t"}
    assert outcomes(path) == [UndoOutcome.TRACED]
    assert child.states() == {"t"}
    assert [one.id for one in read(path)] == [entry.id]
    assert libc.ptrace(PTRACE_DETACH, child.process.tgid, None, None) == 0
    assert not child.was_continued(0)


def test_a_process_whose_stop_is_still_pending_is_resumed(
    path: Path, tmp_path: Path, spawn: Callable[..., Child]
) -> None:
    """A stop that is not yet delivered cannot be held still, so /proc is a copy with the bit set."""
    child = spawn()
    tgid = child.process.tgid
    task = tmp_path / f"proc/{tgid}/task/{tgid}"
    task.mkdir(parents=True)
    shutil.copyfile(f"/proc/{tgid}/stat", tmp_path / f"proc/{tgid}/stat")
    shutil.copyfile(f"/proc/{tgid}/stat", task / "stat")
    text = Path(f"/proc/{tgid}/status").read_text()
    (task / "status").write_text(text.replace("ShdPnd:\t0000000000000000", "ShdPnd:\t0000000000040000"))
    intend(path, child.process)
    assert outcomes(path, str(tmp_path / "proc")) == [UndoOutcome.RESUMED]
    assert child.was_continued(DEADLINE_SECONDS)


def test_a_ledger_that_cannot_be_written_keeps_no_process_stopped(path: Path, spawn: Callable[..., Child]) -> None:
    child = spawn()
    entry = intend(path, child.process)
    child.stop()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, hard))
    try:
        with pytest.raises(LedgerError):
            Ledger(path).done(entry.id)
        assert outcomes(path) == [UndoOutcome.RESUMED]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert child.was_continued(DEADLINE_SECONDS)
    assert outcomes(path) == [UndoOutcome.RUNNING]


def test_an_act_that_was_repeated_while_it_was_undone_keeps_its_entry(
    path: Path, spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn()
    first, second = (LedgerEntry.of("pace", child.process, ContainerKey("c"), wall_ns) for wall_ns in (1, 2))
    ledger = Ledger(path)
    ledger.intend(first)

    def undo(entry: LedgerEntry, procfs: Procfs) -> UndoOutcome:
        ledger.intend(second)
        return resume(entry, procfs)

    monkeypatch.setitem(UNDO, "pace", replace(UNDO["pace"], undo=undo))
    assert outcomes(path) == [UndoOutcome.RUNNING]
    assert [entry.wall_ns for entry in read(path)] == [2]


def test_what_is_undone_quickly_is_closed_before_what_takes_long(
    path: Path, spawn: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = spawn()
    intend(path, child.process, "swap")
    intend(path, child.process, "pace")
    seen: list[str] = []

    def undo(_entry: LedgerEntry, _procfs: Procfs) -> UndoOutcome:
        seen.extend(entry.act for entry in read(path))
        return UndoOutcome.RESTORED

    monkeypatch.setitem(UNDO, "swap", replace(UNDO["swap"], undo=undo))
    assert outcomes(path) == [UndoOutcome.RUNNING, UndoOutcome.RESTORED]
    assert seen == ["swap"]
    assert read(path) == []


def test_a_ledger_that_is_not_there_or_is_rubbish_releases_nothing(path: Path) -> None:
    assert release_all(path) == []
    assert not path.exists()
    path.write_bytes(os.urandom(4096))
    assert release_all(path) == []


def test_a_process_killed_in_the_middle_of_acting_leaves_a_ledger_that_undoes_it(
    path: Path, spawn: Callable[..., Child]
) -> None:
    children = [spawn() for _ in range(3)]
    actor = os.fork()
    if actor == 0:
        try:
            ledger = Ledger(path)
            for child in children:
                ledger.intend(LedgerEntry.of("pace", child.process, ContainerKey("c"), 0))
                os.kill(child.process.tgid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(actor, 0)
    assert os.WIFSIGNALED(status), sys.exc_info()
    until(lambda: all(child.states() == {"T"} for child in children), "all processes to be stopped")
    assert outcomes(path) == [UndoOutcome.RESUMED] * 3
    until(lambda: all(child.states() == {"S"} for child in children), "all processes to run")


def release_seconds(path: Path, count: int) -> float:
    """Of so many entries of processes that have ended."""
    lines = (LedgerEntry.of("pace", ProcessId(2**22 + n, 1), ContainerKey("c"), 0) for n in range(1, count + 1))
    path.write_bytes(b"".join(map(intend_line, lines)))
    path.chmod(0o600)
    began = time.process_time()
    released = release_all(path)
    seconds = time.process_time() - began
    assert [one.outcome for one in released] == [UndoOutcome.GONE] * count
    assert read(path) == []
    return seconds


def test_releasing_four_times_as_much_takes_four_times_as_long(tmp_path: Path) -> None:
    small, large = (min(release_seconds(tmp_path / f"{n}", n) for _ in range(3)) for n in (1024, 4096))
    print(f"1,024 entries: {small * 1e3:.0f} ms, 4,096: {large * 1e3:.0f} ms")
    assert large <= 6 * small
