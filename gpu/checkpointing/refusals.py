# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about calls that cannot succeed: which error comes, how soon, and that nothing stays locked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, Final

from gpu.checkpointing.stage import CALL_SECONDS, Stage, did, row, told
from gpu.clients import SilenceError
from gpu.here import Unavailable
from gpu.parts import judged
from gpu.row import Row, Verdict
from gpu.stopping.brakes import is_stopped
from gpu.stopping.warden import until

NO_CUDA: Final = "error for a process without CUDA"
GONE: Final = "error for a process that has ended"
NOT_LOCKED: Final = "error of an unlock of a running process"
LOCKED: Final = "error of a lock of a locked process"
WHATS: Final = (NO_CUDA, GONE, NOT_LOCKED, LOCKED)
LATE: Final = "error of a lock that gives up amid long kernels"
LATE_MS: Final = "a lock with a limit of 200 ms gives up after"
LATE_STATE: Final = "state after the lock that gave up"
PATIENT: Final = "a lock with a long limit waits for what is queued"
STOPPED: Final = "error of a lock with a limit of 300 ms of a stopped process"
BUSY: Final = (LATE, LATE_MS, LATE_STATE, PATIENT, STOPPED)
NO_ROOM: Final = "error of a restore without room on the device"
STAYS: Final = "state after the restore without room"
ROOM: Final = (NO_ROOM, STAYS)
MPS: Final = "error of a lock of an MPS client"
_INVALID_VALUE, _OUT_OF_MEMORY, _NOT_INITIALIZED, _ILLEGAL_STATE, _NOT_READY, _NOT_SUPPORTED = 1, 2, 3, 401, 600, 801
_SMALL_BYTES: Final = 1 << 24
_LIMIT_MS: Final = 200
_LEAVE_BYTES: Final = 1 << 26
_MOST_USED_BYTES: Final = 4 << 30  # by others: more, and taking the rest might harm them


def rows(stage: Stage) -> Iterator[Row]:
    """Of processes in the wrong state."""
    with stage.calls() as calls, stage.holder(_SMALL_BYTES) as holder:
        yield _refused(NO_CUDA, calls.ask(f"state {os.getpid()}", CALL_SECONDS), _NOT_INITIALIZED)
        yield _refused(GONE, calls.ask(f"state {_ended_tgid(stage)}", CALL_SECONDS), _INVALID_VALUE)
        yield _refused(NOT_LOCKED, calls.ask(f"unlock {holder.tgid}", CALL_SECONDS), _ILLEGAL_STATE)
        did(calls, f"lock {holder.tgid} 5000")
        yield _refused(LOCKED, calls.ask(f"lock {holder.tgid} 500", CALL_SECONDS), _ILLEGAL_STATE)
        did(calls, f"unlock {holder.tgid}")


def busy(stage: Stage) -> Iterator[Row]:
    """Of a process in the middle of its work, and of one that cannot take part."""
    kernel_ms, count = 150, 4
    with stage.calls() as calls, stage.holder(_SMALL_BYTES) as holder:
        told(holder, f"busy {kernel_ms * 1000} 0")  # the buffer is made
        told(holder, f"busy {kernel_ms * 1000} {count}")
        said = calls.ask(f"lock {holder.tgid} {_LIMIT_MS}", CALL_SECONDS)
        if not said["code"]:
            did(calls, f"unlock {holder.tgid}")
        yield _refused(LATE, said, _NOT_READY)
        near = _LIMIT_MS <= said["ms"] <= _LIMIT_MS + 2 * kernel_ms
        yield row(LATE_MS, judged(near), said["ms"], "ms", _LIMIT_MS, f"kernels of {kernel_ms} ms were queued")
        state = did(calls, f"state {holder.tgid}")["state"]
        yield row(LATE_STATE, judged(state == "RUNNING"), state, baseline="RUNNING")
        told(holder, "wait")
        told(holder, f"busy {kernel_ms * 1000} {count}")
        said = did(calls, f"lock {holder.tgid} 8000")
        yield row(PATIENT, Verdict.MEASURED, said["ms"], "ms", float(kernel_ms * count))
        did(calls, f"unlock {holder.tgid}")
        told(holder, "step")
    yield from _stopped(stage)


def _stopped(stage: Stage) -> Iterator[Row]:
    with stage.calls() as calls, stage.holder(_SMALL_BYTES) as holder:
        os.kill(holder.tgid, signal.SIGSTOP)
        until(lambda: is_stopped(holder.tgid), "the process to be stopped", 5.0)
        begun = time.monotonic()
        try:
            yield _refused(STOPPED, calls.ask(f"lock {holder.tgid} 300", 4.0), _NOT_READY)
        except SilenceError:
            seconds = time.monotonic() - begun
            yield row(STOPPED, Verdict.DIFFERS, "none", baseline=_NOT_READY, note=f"it hung for {seconds:.1f} s")
        finally:
            os.kill(holder.tgid, signal.SIGCONT)


def room(stage: Stage) -> Iterator[Row]:
    """Somebody else takes what a saved process had."""
    with stage.calls() as calls:
        if did(calls, "memory")["used"] > _MOST_USED_BYTES:
            raise Unavailable("others use this GPU: to take all of its memory might harm them")
        with stage.holder(stage.saved_bytes) as saved, stage.holder(0) as other:
            did(calls, f"lock {saved.tgid} 5000")
            did(calls, f"checkpoint {saved.tgid}", 60.0)
            told(other, f"fill {_LEAVE_BYTES}", 30.0)
            yield _refused(NO_ROOM, calls.ask(f"restore {saved.tgid}", 30.0), _OUT_OF_MEMORY)
            state = did(calls, f"state {saved.tgid}")["state"]
            yield row(STAYS, judged(state == "CHECKPOINTED"), state, baseline="CHECKPOINTED")
            told(other, "drop", 30.0)
            did(calls, f"release {saved.tgid}", 60.0)
            told(saved, "step", 30.0)


def under_mps(stage: Stage) -> Iterator[Row]:
    """The caller is no client of the daemon."""
    with stage.here.mps() as extra, stage.holder(_SMALL_BYTES, extra=extra) as holder, stage.calls() as calls:
        said = calls.ask(f"lock {holder.tgid} 2000", CALL_SECONDS)
        if not said["code"]:
            calls.ask(f"unlock {holder.tgid}", CALL_SECONDS)
        yield _refused(MPS, said, _NOT_SUPPORTED)


def _refused(what: str, said: dict[str, Any], expected: int) -> Row:
    note = f"{said.get('said') or 'it succeeded'}, after {said['ms']:.1f} ms"
    return row(what, judged(said["code"] == expected), said["code"], baseline=expected, note=note)


def _ended_tgid(stage: Stage) -> int:
    """Of a process that was, and is waited for."""
    process = stage.here.start(["true"])
    process.wait(10)
    stage.here.end(process)
    return process.pid
