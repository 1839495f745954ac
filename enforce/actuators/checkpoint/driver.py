# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver's checkpoint calls through ctypes, as cuda.h of CUDA 12.8 declares them. For the helper program only."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Protocol

from agent.errors import SetupError, WardenError

PREFIX = "cuCheckpointProcess"
CALLS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
_TEXTS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    401: "CUDA_ERROR_ILLEGAL_STATE",
    600: "CUDA_ERROR_NOT_READY",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, ILLEGAL_STATE, NOT_READY, NOT_PERMITTED, NOT_SUPPORTED = _TEXTS


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
        """What the process is in now."""
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
        self._library.cuInit(0)  # wanted where persistence mode is off; if it fails, the restore says why
        self._call("Restore", tgid, None)

    def unlock(self, tgid: int) -> None:
        self._call("Unlock", tgid, None)

    def _call(self, call: str, tgid: int, argument: object) -> None:
        code = int(getattr(self._library, PREFIX + call)(ctypes.c_int(tgid), argument))
        if code:
            raise CallError(call, code)
