# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about calls that cannot succeed: which error comes, how soon, and that nothing stays locked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from conformance.checks.checkpoint.stage import CALL_SECONDS, Stage, must_call, must_do, row
from conformance.checks.stopping.holds import StuckError, is_stopped
from conformance.clients.launcher import Client, SilenceError
from conformance.host import Unavailable
from conformance.report.model import Row, Verdict, judged
from tools.harness.wait import poll, until

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
STOPPED_STATES: Final = "its states after the caller was killed: stopped, when it runs again, and released"
HELD: Final = (STOPPED, STOPPED_STATES)
BUSY: Final = (LATE, LATE_MS, LATE_STATE, PATIENT)
NO_ROOM: Final = "error of a restore without room on the device"
STAYS: Final = "state after the restore without room"
AGAIN: Final = "a restore once there is room again"  # never, by 580.159.04
AGAIN_STATE: Final = "state after that"
ROOM: Final = (NO_ROOM, STAYS, AGAIN, AGAIN_STATE)
MPS: Final = "error of a lock of an MPS client"
MPS_STATE: Final = "state of an MPS client after it"
MPS_GOES_ON: Final = "an MPS client launches after it"
UNDER_MPS: Final = (MPS, MPS_STATE, MPS_GOES_ON)
_OUT_OF_MEMORY, _NOT_INITIALIZED, _OPERATING_SYSTEM, _ILLEGAL_STATE, _NOT_READY, _NOT_SUPPORTED = (
    2,
    3,
    304,
    401,
    600,
    801,
)
_SMALL_BYTES: Final = 1 << 24
_LIMIT_MS: Final = 200
_NO_ANSWER: Final = "no answer"
_SETTLED_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 4.0  # far more than any of these calls should take
_AGAIN_SECONDS: Final = 5.0
_MOST_USED_BYTES: Final = 4 << 30  # by others: more, and taking the rest might harm them


def rows(stage: Stage) -> Iterator[Row]:
    """Of processes in the wrong state. Each call has a caller of its own: one that hangs is no more use."""
    with stage.holder(_SMALL_BYTES) as holder:
        for what, command, expected in (
            (NO_CUDA, f"state {os.getpid()}", _NOT_INITIALIZED),
            (GONE, f"state {_ended_tgid(stage)}", _OPERATING_SYSTEM),
            (NOT_LOCKED, f"unlock {holder.tgid}", _ILLEGAL_STATE),
        ):
            with stage.calls() as calls:
                yield refused(what, asked(calls, command), expected)
        with stage.calls() as calls, stage.calls() as another:
            must_call(calls, f"lock {holder.tgid} 5000")
            yield refused(LOCKED, asked(another, f"lock {holder.tgid} 500"), _ILLEGAL_STATE)


def busy(stage: Stage) -> Iterator[Row]:
    """Locking a process in the middle of its work."""
    kernel_ms, count = 150, 4
    with stage.calls() as calls, stage.calls() as later, stage.holder(_SMALL_BYTES) as holder:
        must_do(holder, f"busy {kernel_ms * 1000} 0")  # the buffer is made
        must_do(holder, f"busy {kernel_ms * 1000} {count}")
        answer = asked(calls, f"lock {holder.tgid} {_LIMIT_MS}")
        yield refused(LATE, answer, _NOT_READY)
        near = _LIMIT_MS <= answer["ms"] <= _LIMIT_MS + 2 * kernel_ms
        yield row(LATE_MS, judged(near), answer["ms"], "ms", _LIMIT_MS, f"kernels of {kernel_ms} ms were queued")
        state = must_call(later, f"state {holder.tgid}")["state"]
        yield row(LATE_STATE, judged(state == "RUNNING"), state, baseline="RUNNING")
        must_call(later, f"release {holder.tgid}")
        must_do(holder, "wait")
        must_do(holder, f"busy {kernel_ms * 1000} {count}")
        answer = must_call(later, f"lock {holder.tgid} 8000")
        yield row(PATIENT, Verdict.MEASURED, answer["ms"], "ms", float(kernel_ms * count))
        must_call(later, f"unlock {holder.tgid}")
        must_do(holder, "step")


def stopped(stage: Stage) -> Iterator[Row]:
    """Locking a process that cannot take part: its caller does not come back, with 580.159.04."""
    with stage.calls() as calls, stage.calls() as later, stage.holder(_SMALL_BYTES) as holder:
        os.kill(holder.tgid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(holder.tgid), "the process to be stopped", 5.0, error=StuckError)
            yield refused(STOPPED, asked(calls, f"lock {holder.tgid} 300"), _NO_ANSWER)
            calls.end()
            answers = [asked(later, f"state {holder.tgid}")]
        finally:
            os.kill(holder.tgid, signal.SIGCONT)
        time.sleep(_SETTLED_SECONDS)
        answers += [asked(later, f"{command} {holder.tgid}") for command in ("state", "release")]
        works = answers[-1].get("state") == "RUNNING" and "error" not in holder.ask("step", CALL_SECONDS)
        states = ", ".join(str(one.get("state") or one["code"]) for one in answers)
        yield row(STOPPED_STATES, judged(works), states, baseline="LOCKED, LOCKED, RUNNING")


def room(stage: Stage) -> Iterator[Row]:
    """Another process takes the memory that a saved process had."""
    with stage.calls() as calls, stage.calls() as later:
        if must_call(calls, "memory")["used"] > _MOST_USED_BYTES:
            raise Unavailable("others use this GPU: to take all of its memory might harm them")
        with stage.holder(stage.saved_bytes) as saved, stage.holder(0) as other:
            must_call(calls, f"lock {saved.tgid} 5000")
            must_call(calls, f"checkpoint {saved.tgid}", 60.0)
            free = must_do(other, f"fill {stage.saved_bytes // 2}", 30.0)["free"]
            if free >= stage.saved_bytes:
                raise Unavailable(f"{free >> 20} MiB stay free, which is room enough")
            yield refused(NO_ROOM, asked(calls, f"restore {saved.tgid}", 20.0), _OUT_OF_MEMORY)
            state = must_call(later, f"state {saved.tgid}")["state"]
            yield row(STAYS, judged(state == "CHECKPOINTED"), state, baseline="CHECKPOINTED")
            must_do(other, "drop", 30.0)
            yield _again(later, saved)
            state = asked(later, f"state {saved.tgid}")
            same = state.get("state") == "CHECKPOINTED"
            yield row(AGAIN_STATE, judged(same), state.get("state", state["code"]), baseline="CHECKPOINTED")


def _again(calls: Client, saved: Client) -> Row:
    """Tried for a while: the driver may need time to see that there is room."""
    answers: list[dict[str, Any]] = []

    def works() -> bool:
        answers.append(asked(calls, f"release {saved.tgid}", 30.0))
        return not answers[-1]["code"]

    begun = time.monotonic()
    worked = poll(works, _AGAIN_SECONDS, 0.5)
    errors = ", then ".join(dict.fromkeys(one["message"] or "it succeeded" for one in answers))
    note = f"{len(answers)} tries in {time.monotonic() - begun:.1f} s: {errors}"
    return row(AGAIN, judged(not worked), "works" if worked else "refused", baseline="refused", note=note)


def under_mps(stage: Stage) -> Iterator[Row]:
    """The caller is no client of the daemon."""
    with stage.host.mps() as extra, stage.holder(_SMALL_BYTES, extra=extra) as holder, stage.calls() as calls:
        answer = asked(calls, f"lock {holder.tgid} 2000")
        if not answer["code"]:
            must_call(calls, f"unlock {holder.tgid}")
        yield refused(MPS, answer, _NOT_SUPPORTED)
        with stage.calls() as later:
            state = asked(later, f"state {holder.tgid}")
        yield row(MPS_STATE, Verdict.MEASURED, str(state.get("state", state["code"])), note=state.get("message", ""))
        works = "error" not in holder.ask("step", CALL_SECONDS)
        yield row(MPS_GOES_ON, judged(works), works, baseline=True)


def asked(calls: Client, command: str, seconds: float = _PATIENCE_SECONDS) -> dict[str, Any]:
    """A call that need not succeed. No answer is one, too, and the caller's last."""
    begun = time.monotonic_ns()
    try:
        return calls.ask(command, seconds)
    except SilenceError as error:
        answer = f"no answer in {seconds:g} s: {error}"
        return {"code": _NO_ANSWER, "message": answer, "ms": (time.monotonic_ns() - begun) / 1e6}


def refused(what: str, answer: Mapping[str, Any], expected: int | str) -> Row:
    """A row of what was asked, and of the error that it should have got."""
    note = f"{answer.get('message') or 'it succeeded'}, after {answer['ms']:.1f} ms"
    return row(what, judged(answer["code"] == expected), answer["code"], baseline=expected, note=note)


def _ended_tgid(stage: Stage) -> int:
    """The pid of a process that has ended and been waited for."""
    process = stage.host.start(["true"])
    process.wait(10)
    stage.host.end(process)
    return process.pid
