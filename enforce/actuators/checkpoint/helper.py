# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Starts the helper program, one at a time for each process, and reads its answer; finds its library; undoes its acts.

`ask` first takes a lock that the helper inherits, on a file in /proc of the process that is acted on: so the lock is
that process's alone and ends with it. When the agent is killed its helper goes on; what undoes the act waits for the
helper's end, and so cannot look before the act and be gone after it.

`release_process` undoes `lock` and `swap` from the ledger's entry alone, from any state that the driver reports back to
running. A process that does not fit on its device stays saved, and its entry stays, to be tried again when there is
room: the entry says how much it needs.

`DriverLibrary` says which driver library to load, and whether it has the calls. The file is read, never loaded here.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from agent.core.errors import GoneError, ProbeError, SetupError, WardenError
from agent.core.model import ProcessId
from agent.node.pidfd import check_identity
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint.driver import CALLS, PREFIX, AnswerKind, CheckpointState, HelperAnswer, parse_answer
from enforce.ledger.entries import LedgerEntry, UndoOutcome

LOCK_LIMIT_MS = 2000  # how long a lock may wait for the work to drain; nothing new is launched meanwhile
_LIMITS_SECONDS = {"state": 15.0, "held": 15.0, "lock": 15.0}  # a lock of a process that is stopped has no end
_COPY_LIMIT_SECONDS = 120.0  # all other acts may move a device's memory
_GRACE_SECONDS = 10.0  # the helper ends itself at its limit
_AGAIN_SECONDS = 0.01
_NO_MPS = "/nonexistent/gpuwarden"  # with a daemon's pipe the helper would become its client
_NS_PER_MS = 1_000_000
_SETTLE_MS = LOCK_LIMIT_MS + 1000  # after that a lock that was asked for has taken effect, or has timed out
_OVER = {AnswerKind.GONE: UndoOutcome.GONE, AnswerKind.NO_CUDA: UndoOutcome.RUNNING}
_SEARCH_AGAIN_NS = 60_000_000_000  # a search starts programs, and it may be asked for at every decision
_not_ours: set[ProcessId] = set()
_settled: set[ProcessId] = set()
_late: set[ProcessId] = set()
_Version = tuple[str, int, int]  # path, inode, mtime


class CheckpointError(WardenError):
    """A process could not be locked, saved or released. The message says why."""


def ask(act: str, process: ProcessId, library: str = "", *options: str) -> HelperAnswer:
    """One act on one process. Blocks until the helper has ended, at most for its limit. Every failure is an answer.

    `options`: further ones of the helper's command line.
    """
    limit_seconds = _LIMITS_SECONDS.get(act, _COPY_LIMIT_SECONDS)
    # -I: neither the working directory nor the caller's environment says what runs
    command = [sys.executable, "-I", "-m", "enforce.actuators.checkpoint", act]
    command += ["--pid", str(process.tgid), "--start-ticks", str(process.start_ticks)]
    command += ["--timeout-ms", str(LOCK_LIMIT_MS), "--limit-ms", str(int(limit_seconds * 1000))]
    command += ["--library", library, *options]
    if act in ("lock", "swap-out"):
        command += ["--parent", str(os.getpid())]
    try:
        with _alone(process, limit_seconds) as held:
            return _run(command, limit_seconds + _GRACE_SECONDS, held)
    except TimeoutError:
        return HelperAnswer(AnswerKind.BUSY, error=f"another act on process {process.tgid} takes long")
    except GoneError as error:
        return HelperAnswer(AnswerKind.GONE, error=str(error))
    except OSError as error:
        return HelperAnswer(
            AnswerKind.FAILED, error=f"the checkpoint helper cannot be started ({error}): free memory or processes"
        )


def _run(command: list[str], limit_seconds: float, held: int | None) -> HelperAnswer:
    helper = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(),
        pass_fds=() if held is None else (held,),
        start_new_session=True,  # it outlives the agent
        text=True,
    )
    with helper:
        try:
            output, _ = helper.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            helper.kill()
            return HelperAnswer(AnswerKind.TIMEOUT, error="the driver did not return in time")
    if not output:
        return HelperAnswer(
            AnswerKind.TIMEOUT, error=f"the checkpoint helper ended with code {helper.returncode} before its answer"
        )
    return parse_answer(output.splitlines()[-1])


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return environment | {"CUDA_MPS_PIPE_DIRECTORY": _NO_MPS}


@contextmanager
def _alone(process: ProcessId, limit_seconds: float) -> Iterator[int | None]:
    """The lock, as a descriptor that the helper inherits. TimeoutError while another helper acts."""
    try:
        held = os.open(f"/proc/{process.tgid}/environ", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError(f"process {process.tgid} has ended") from error
    except PermissionError:  # without CAP_SYS_PTRACE: as good as it gets
        yield None
        return
    try:
        _wait_for(held, time.monotonic() + limit_seconds)
        yield held
    finally:
        with suppress(OSError):
            os.close(held)


def _wait_for(held: int, ends: float) -> None:
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends:
                raise TimeoutError from None
            time.sleep(_AGAIN_SECONDS)
        else:
            return


def about_to_act(process: ProcessId) -> None:
    """A lock found later may be ours, and may take effect after the state was read."""
    _not_ours.discard(process)
    _settled.discard(process)


def unanswered(process: ProcessId) -> None:
    """Its helper has given up: a lock that it asked for takes effect when the process runs again, whenever that is.

    Until it has been waited for, nothing that another helper sees says anything else.
    """
    _late.add(process)


def acted(process: ProcessId, foreign: bool = False) -> None:
    """Its helper has answered: nothing takes effect later. `foreign`: another program locked it just before."""
    if process in _late:
        return
    _settled.add(process)
    if foreign:
        _not_ours.add(process)


def release_process(entry: LedgerEntry, procfs: Procfs) -> UndoOutcome:
    """Raises GoneError, or CheckpointError when it is not released yet."""
    process = entry.process
    if process is None:
        return UndoOutcome.GONE
    check_identity(process, procfs)
    if process in _not_ours:
        return UndoOutcome.RUNNING
    settle_ms = 0 if process in _settled else _settle_ms(entry.wall_ns, time.time_ns())
    settle_ms = _SETTLE_MS if process in _late else settle_ms
    answer = ask("release", process, entry.place, f"--settle-ms={settle_ms}", *needs_option(entry))
    if answer.kind in _OVER:
        _late.discard(process)
        return _OVER[answer.kind]
    if answer.kind is not AnswerKind.DONE:
        raise CheckpointError(answer.error or str(answer.kind))
    _late.discard(process)
    return UndoOutcome.RUNNING if answer.before is CheckpointState.RUNNING else UndoOutcome.RESUMED


def _settle_ms(intended_wall_ns: int, now_wall_ns: int) -> int:
    """How long the act may still take effect. A clock that was set back makes it longer, by a bound."""
    age_ms = (now_wall_ns - intended_wall_ns) // _NS_PER_MS
    return max(0, min(_SETTLE_MS, _SETTLE_MS - age_ms))


def needs_option(entry: LedgerEntry | None) -> tuple[str, ...]:
    """The helper's option for what the process holds, or held, on its devices; none where that is unknown."""
    if entry is None or entry.device_bytes is None:
        return ()
    return (f"--needs={json.dumps(dict(entry.device_bytes))}",)


def _host_libraries(extra: Iterable[str]) -> list[str]:
    from agent.probes.discovery import host_libraries  # slow to import, and not needed to undo

    return host_libraries(extra)


@dataclass(slots=True)
class DriverLibrary:
    """The first of the node's libraries; looked for again when it was replaced. `extra` are configured paths.

    After a search that found nothing the next one comes a minute later.
    """

    extra: tuple[str, ...] = ()
    find: Callable[[Iterable[str]], list[str]] = _host_libraries
    clock: Callable[[], int] = time.monotonic_ns
    _known: _Version | None = None
    _missing: tuple[str, ...] = field(default=())
    _failed: tuple[int, str] | None = None  # when, why

    def path(self) -> str:
        """SetupError when there is none, or one before R570."""
        version = self._current()
        if self._missing:
            wanted = ", ".join(self._missing)
            raise SetupError(f"{version[0]} has no {wanted}: driver R570 or newer is needed")
        return version[0]

    def _current(self) -> _Version:
        version = _version(self._known[0]) if self._known else None
        if version is not None and version == self._known:
            return version
        if self._failed is not None and self.clock() - self._failed[0] < _SEARCH_AGAIN_NS:
            raise SetupError(self._failed[1])
        try:
            version = version or self._find()
            self._missing = _missing(version[0])
        except SetupError as error:
            self._failed = self.clock(), str(error)
            raise
        self._known, self._failed = version, None
        return version

    def _find(self) -> _Version:
        for path in self.find(self.extra):
            version = _version(path)
            if version is not None:
                return version
        raise SetupError("no libcuda.so.1 on this node: without it nothing can be locked; give its path with --libcuda")


def _version(path: str) -> _Version | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return path, facts.st_ino, facts.st_mtime_ns


def _missing(path: str) -> tuple[str, ...]:
    from agent.node.elf import exported_functions  # as above

    try:
        exports = exported_functions(path, PREFIX)
    except (ProbeError, OSError) as error:
        raise SetupError(f"{path}: {error}") from error
    return tuple(PREFIX + call for call in CALLS if PREFIX + call not in exports)
