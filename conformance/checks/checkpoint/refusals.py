# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about calls that cannot succeed: which error comes, how soon, and that nothing stays locked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpu.checkpointing.stage import Stage, did, row, told
from gpu.clients import Client, SilenceError
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
BUSY: Final = (LATE, LATE_MS, LATE_STATE, PATIENT)
NO_ROOM: Final = "error of a restore without room on the device"
STAYS: Final = "state after the restore without room"
ROOM: Final = (NO_ROOM, STAYS)
MPS: Final = "error of a lock of an MPS client"
_INVALID_VALUE, _OUT_OF_MEMORY, _NOT_INITIALIZED, _ILLEGAL_STATE, _NOT_READY, _NOT_SUPPORTED = 1, 2, 3, 401, 600, 801
_SMALL_BYTES: Final = 1 << 24
_LIMIT_MS: Final = 200
_PATIENCE_SECONDS: Final = 4.0  # far more than any of these calls should take
_MOST_USED_BYTES: Final = 4 << 30  # by others: more, and taking the rest might harm them


def rows(stage: Stage) -> Iterator[Row]:
    """Of processes in the wrong state. Each call has a caller of its own: one that hangs is no more use."""
    with stage.holder(_SMALL_BYTES) as holder:
        for what, command, expected in (
            (NO_CUDA, f"state {os.getpid()}", _NOT_INITIALIZED),
            (GONE, f"state {_ended_tgid(stage)}", _INVALID_VALUE),
            (NOT_LOCKED, f"unlock {holder.tgid}", _ILLEGAL_STATE),
        ):
            with stage.calls() as calls:
                yield refused(what, asked(calls, command), expected)
        with stage.calls() as calls, stage.calls() as another:
            did(calls, f"lock {holder.tgid} 5000")
            yield refused(LOCKED, asked(another, f"lock {holder.tgid} 500"), _ILLEGAL_STATE)


def busy(stage: Stage) -> Iterator[Row]:
    """Of a process in the middle of its work."""
    kernel_ms, count = 150, 4
    with stage.calls() as calls, stage.calls() as later, stage.holder(_SMALL_BYTES) as holder:
        told(holder, f"busy {kernel_ms * 1000} 0")  # the buffer is made
        told(holder, f"busy {kernel_ms * 1000} {count}")
        said = asked(calls, f"lock {holder.tgid} {_LIMIT_MS}")
        yield refused(LATE, said, _NOT_READY)
        near = _LIMIT_MS <= said["ms"] <= _LIMIT_MS + 2 * kernel_ms
        yield row(LATE_MS, judged(near), said["ms"], "ms", _LIMIT_MS, f"kernels of {kernel_ms} ms were queued")
        state = did(later, f"state {holder.tgid}")["state"]
        yield row(LATE_STATE, judged(state == "RUNNING"), state, baseline="RUNNING")
        did(later, f"release {holder.tgid}")
        told(holder, "wait")
        told(holder, f"busy {kernel_ms * 1000} {count}")
        said = did(later, f"lock {holder.tgid} 8000")
        yield row(PATIENT, Verdict.MEASURED, said["ms"], "ms", float(kernel_ms * count))
        did(later, f"unlock {holder.tgid}")
        told(holder, "step")


def stopped(stage: Stage) -> Iterator[Row]:
    """Of a process that cannot take part."""
    with stage.calls() as calls, stage.holder(_SMALL_BYTES) as holder:
        os.kill(holder.tgid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(holder.tgid), "the process to be stopped", 5.0)
            yield refused(STOPPED, asked(calls, f"lock {holder.tgid} 300"), _NOT_READY)
        finally:
            os.kill(holder.tgid, signal.SIGCONT)


def room(stage: Stage) -> Iterator[Row]:
    """Somebody else takes what a saved process had."""
    with stage.calls() as calls, stage.calls() as later:
        if did(calls, "memory")["used"] > _MOST_USED_BYTES:
            raise Unavailable("others use this GPU: to take all of its memory might harm them")
        with stage.holder(stage.saved_bytes) as saved, stage.holder(0) as other:
            did(calls, f"lock {saved.tgid} 5000")
            did(calls, f"checkpoint {saved.tgid}", 60.0)
            free = told(other, f"fill {stage.saved_bytes // 2}", 30.0)["free"]
            if free >= stage.saved_bytes:
                raise Unavailable(f"{free >> 20} MiB stay free, which is room enough")
            yield refused(NO_ROOM, asked(calls, f"restore {saved.tgid}", 20.0), _OUT_OF_MEMORY)
            state = did(later, f"state {saved.tgid}")["state"]
            yield row(STAYS, judged(state == "CHECKPOINTED"), state, baseline="CHECKPOINTED")
            told(other, "drop", 30.0)
            did(later, f"release {saved.tgid}", 60.0)
            told(saved, "step", 30.0)


def under_mps(stage: Stage) -> Iterator[Row]:
    """The caller is no client of the daemon."""
    with stage.here.mps() as extra, stage.holder(_SMALL_BYTES, extra=extra) as holder, stage.calls() as calls:
        said = asked(calls, f"lock {holder.tgid} 2000")
        if not said["code"]:
            did(calls, f"unlock {holder.tgid}")
        yield refused(MPS, said, _NOT_SUPPORTED)


def asked(calls: Client, command: str, seconds: float = _PATIENCE_SECONDS) -> dict[str, Any]:
    """A call that need not succeed. No answer is one, too, and the caller's last."""
    begun = time.monotonic_ns()
    try:
        return calls.ask(command, seconds)
    except SilenceError as error:
        said = f"no answer in {seconds:g} s: {error}"
        return {"code": "no answer", "said": said, "ms": (time.monotonic_ns() - begun) / 1e6}


def refused(what: str, said: Mapping[str, Any], expected: int) -> Row:
    """A row of what was asked, and of the error that it should have got."""
    note = f"{said.get('said') or 'it succeeded'}, after {said['ms']:.1f} ms"
    return row(what, judged(said["code"] == expected), said["code"], baseline=expected, note=note)


def _ended_tgid(stage: Stage) -> int:
    """Of a process that was, and is waited for."""
    process = stage.here.start(["true"])
    process.wait(10)
    stage.here.end(process)
    return process.pid
