# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver's checkpoint calls through ctypes, as cuda.h of CUDA 12.8 declares them, and the helper program's answer.

The calls are for the helper program only. The answer is one line of JSON, which the process that started it parses.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

from agent.core.errors import SetupError, WardenError

PREFIX = "cuCheckpointProcess"
CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")

_TEXTS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    600: "CUDA_ERROR_NOT_READY",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}

(
    INVALID_VALUE,
    OUT_OF_MEMORY,
    NOT_INITIALIZED,
    OPERATING_SYSTEM,
    ILLEGAL_STATE,
    NOT_READY,
    NOT_PERMITTED,
    NOT_SUPPORTED,
) = _TEXTS


class State(IntEnum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CallError(WardenError):
    """The driver refused a call. `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{PREFIX}{call} returned {_TEXTS.get(code, code)}")
        self.code = code


class Driver(Protocol):
    """What the transitions need. Every call may block, and may raise CallError."""

    def state(self, tgid: int) -> State:
        """The state of the process now."""
        ...

    def lock(self, tgid: int, limit_ms: int) -> None:
        """RUNNING → LOCKED when its work has drained, or NOT_READY."""
        ...

    def checkpoint(self, tgid: int) -> None:
        """LOCKED → CHECKPOINTED: its device memory goes to the host."""
        ...

    def restore(self, tgid: int) -> None:
        """CHECKPOINTED → LOCKED, or OUT_OF_MEMORY."""
        ...

    def unlock(self, tgid: int) -> None:
        """LOCKED → RUNNING."""
        ...


class _LockArguments(ctypes.Structure):
    _fields_ = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class Cuda:
    """The driver's library at a path. SetupError when it cannot be loaded or is older than R570."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise SetupError(f"the driver library cannot be loaded: {error}") from error
        if not all(hasattr(self._library, PREFIX + call) for call in CALLS):
            raise SetupError(f"{path} has no {PREFIX}…: driver R570 or newer is needed")

    def state(self, tgid: int) -> State:
        found = ctypes.c_int(-1)
        self._call("GetState", tgid, ctypes.byref(found))
        return State(found.value)

    def lock(self, tgid: int, limit_ms: int) -> None:
        self._call("Lock", tgid, ctypes.byref(_LockArguments(timeout_ms=limit_ms)))

    def checkpoint(self, tgid: int) -> None:
        self._call("Checkpoint", tgid, None)

    def restore(self, tgid: int) -> None:
        self._library.cuInit(0)  # needed where persistence mode is off; if it fails, the restore's error says why
        self._call("Restore", tgid, None)

    def unlock(self, tgid: int) -> None:
        self._call("Unlock", tgid, None)

    def _call(self, call: str, tgid: int, argument: object) -> None:
        code = int(getattr(self._library, PREFIX + call)(ctypes.c_int(tgid), argument))
        if code:
            raise CallError(call, code)


class AnswerKind(StrEnum):
    """How an act ended."""

    DONE = "done"
    GONE = "gone"  # the process has ended, or its pid is another's now
    NO_CUDA = "no_cuda"  # it uses no CUDA (any more)
    FOREIGN = "foreign"  # another program has locked it: left alone
    STOPPED = "stopped"  # it is stopped, traced or frozen, so that it cannot take part
    BUSY = "busy"  # its work did not drain in time, or another act on it is under way
    NO_ROOM = "no_room"  # its memory does not fit on the device
    UNSUPPORTED = "unsupported"  # an MPS client, or memory shared with other processes
    NO_DRIVER = "no_driver"  # no driver library, or one before R570
    TIMEOUT = "timeout"  # the driver did not return in time, or its helper died
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class HelperAnswer:
    """How one act on one process ended. `before` and `after`: the driver's state; None where it was not read."""

    kind: AnswerKind
    before: State | None = None
    after: State | None = None
    error: str | None = None

    def to_line(self) -> str:
        """As the helper prints it."""
        states = {"before": self.before, "after": self.after}
        return json.dumps(
            {"kind": self.kind}
            | {name: state.name.lower() for name, state in states.items() if state is not None}
            | ({"error": self.error} if self.error else {})
        )


def parse_answer(line: str) -> HelperAnswer:
    """The inverse of `to_line`; a helper that printed anything else has failed."""
    try:
        record = json.loads(line)
        kind, error = AnswerKind(record["kind"]), record.get("error")
        before, after = (State[record[name].upper()] if name in record else None for name in ("before", "after"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return HelperAnswer(
            AnswerKind.FAILED, error=f"the checkpoint helper printed {line[:80]!r}; see the agent's log"
        )
    return HelperAnswer(kind, before, after, str(error) if error else None)
