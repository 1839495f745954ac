# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver's checkpoint calls through ctypes, as cuda.h of CUDA 12.8 declares them, and the helper program's answer.

The calls are for the helper program only. The answer is one line of JSON, which the process that started it parses.

A restore without room on the device is the end of a process: the driver (580.159.04) refuses each later one, too. So
`RoomChecked` looks for room first, by NVML and by what the process had there before it was saved.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from agent.core.errors import SetupError, WardenError

if TYPE_CHECKING:
    from agent.core.model import Device
    from agent.nvml.client import Nvml

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
    999: "CUDA_ERROR_UNKNOWN",
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
    UNKNOWN,
) = _TEXTS

_HINTS = {
    ("Restore", OUT_OF_MEMORY): "another program took the room meanwhile; if it is refused again, end the process",
    ("Restore", OPERATING_SYSTEM): "the driver restores it no more, as after a restore without room: end the process",
}
Needs = Mapping[str, int]  # device UUID → bytes
T = TypeVar("T")


class CheckpointState(IntEnum):
    """CUprocessState."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CallError(WardenError):
    """The driver refused a call. `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        hint = _HINTS.get((call, code))
        super().__init__(f"{PREFIX}{call} returned {_TEXTS.get(code, code)}" + (f": {hint}" if hint else ""))
        self.code = code


class RefusedError(CallError):
    """A call that was not made. `code` is the CUresult that stands for the reason."""

    def __init__(self, code: int, why: str) -> None:
        WardenError.__init__(self, why)
        self.code = code


class Driver(Protocol):
    """What the transitions need. Every call may block, and may raise CallError."""

    def state(self, tgid: int) -> CheckpointState:
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

    def state(self, tgid: int) -> CheckpointState:
        found = ctypes.c_int(-1)
        self._call("GetState", tgid, ctypes.byref(found))
        return CheckpointState(found.value)

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


class NvmlMemory:
    """What processes hold on the devices, and what is free there, by NVML. SetupError when NVML does not say."""

    def __init__(self, start: Callable[[], Nvml]) -> None:
        self._start = start
        self._nvml: Nvml | None = None

    def held(self, tgid: int) -> dict[str, int]:
        """Device UUID → bytes of the process, its contexts included. Not of a saved one, which NVML does not list."""
        held: dict[str, int] = {}
        nvml, devices = self._session()
        for device in devices:
            for listed, used_bytes in nvml.processes(device):
                if listed == tgid and used_bytes is None:
                    raise SetupError(f"NVML does not say how much process {tgid} holds on {device.uuid}")
                if listed == tgid and used_bytes is not None:
                    held[device.uuid] = used_bytes
        if not held and not any(nvml.lists_processes(device) for device in devices):
            raise SetupError("NVML does not list the processes on the devices")
        return held

    def shortage(self, needs: Needs | None) -> str | None:
        """Why there is no room for `needs`; None: there is. Of unknown needs: unless no process uses any device."""
        nvml, devices = self._session()
        if needs is None:
            if not any(nvml.processes(device) for device in devices):
                return None
            return f"how much it needs is not in the ledger: {_STAYS} when no process uses a GPU of this node"
        for uuid, need in needs.items():
            free = next((nvml.free_bytes(device) for device in devices if device.uuid == uuid), None)
            if free is None:
                raise SetupError(f"NVML does not say how much is free on {uuid}: {_STAYS}")
            if free < need or (free < need + _margin(need) and self._used(uuid)):
                figures = f"{free / _GIB:.1f} GiB are free on {uuid} and {need / _GIB:.1f} GiB needed"
                return f"its memory does not fit on the device now ({figures}): {_STAYS}; free device memory"
        return None

    def _used(self, uuid: str) -> bool:
        nvml, devices = self._session()
        there = [device for device in devices if device.uuid == uuid]
        return any(nvml.processes(device) or not nvml.lists_processes(device) for device in there)

    def _session(self) -> tuple[Nvml, tuple[Device, ...]]:
        if self._nvml is None:
            self._nvml = self._start()
        return self._nvml, self._nvml.devices()


_GIB = 1 << 30
_STAYS = "it stays saved and is tried again"


def _margin(need: int) -> int:
    """What the driver takes beside a process's own bytes was 9 MiB; other programs allocate meanwhile."""
    return max(1 << 26, need // 32)


def nvml_beside(library: str) -> Nvml:
    """A session with the NVML of the same driver; SetupError."""
    from agent.nvml.client import SONAME, Nvml  # slow to import, and only needed to save and restore

    with suppress(OSError):  # once a library of this soname is loaded, the binding gets that one
        ctypes.CDLL(os.path.join(os.path.dirname(library), SONAME))
    nvml = Nvml()
    nvml.open()
    return nvml


class RoomChecked:
    """A driver that never restores without room, nor saves a process that by then has more than `needs`."""

    def __init__(self, driver: Driver, memory: NvmlMemory, needs: Needs | None) -> None:
        self._driver, self._memory, self._needs = driver, memory, needs
        self.state, self.lock, self.unlock = driver.state, driver.lock, driver.unlock

    def checkpoint(self, tgid: int) -> None:
        """As Driver's; RefusedError when it could not be known later whether there is room for it."""
        if self._needs is not None:
            held = _answered(lambda: self._memory.held(tgid))
            if any(used > self._needs.get(uuid, 0) for uuid, used in held.items()):
                raise RefusedError(NOT_READY, "it has allocated memory meanwhile: it is saved the next time")
        self._driver.checkpoint(tgid)

    def restore(self, tgid: int) -> None:
        """As Driver's; RefusedError without room. An allocation of another program in between is not seen."""
        with _one_restore():
            shortage = _answered(lambda: self._memory.shortage(self._needs))
            if shortage is not None:
                raise RefusedError(OUT_OF_MEMORY, shortage)
            self._driver.restore(tgid)


def _answered(question: Callable[[], T]) -> T:
    try:
        return question()
    except SetupError as error:
        raise RefusedError(UNKNOWN, str(error)) from error


@contextmanager
def _one_restore() -> Iterator[None]:
    """Two restores at once could both find the same room. Where the file cannot be opened it goes without."""
    try:
        held = os.open("/proc/vmallocinfo", os.O_RDONLY | os.O_CLOEXEC)  # a file of every node that only root opens
    except OSError:
        yield
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


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
    """How one act on one process ended. `before` and `after`: the driver's state; None where it was not read.

    `held`: what it has on each device, where that was asked for.
    """

    kind: AnswerKind
    before: CheckpointState | None = None
    after: CheckpointState | None = None
    error: str | None = None
    held: Needs | None = None

    def to_line(self) -> str:
        """As the helper prints it."""
        states = {"before": self.before, "after": self.after}
        return json.dumps(
            {"kind": self.kind}
            | {name: state.name.lower() for name, state in states.items() if state is not None}
            | ({"error": self.error} if self.error else {})
            | ({} if self.held is None else {"held": dict(self.held)})
        )


def parse_answer(line: str) -> HelperAnswer:
    """The inverse of `to_line`; a helper that printed anything else has failed."""
    try:
        record = json.loads(line)
        kind, error = AnswerKind(record["kind"]), record.get("error")
        before, after = (
            CheckpointState[record[name].upper()] if name in record else None for name in ("before", "after")
        )
        held = {str(uuid): int(used) for uuid, used in record["held"].items()} if "held" in record else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return HelperAnswer(
            AnswerKind.FAILED, error=f"the checkpoint helper printed {line[:80]!r}; see the agent's log"
        )
    return HelperAnswer(kind, before, after, str(error) if error else None, held)
