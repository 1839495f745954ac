# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver API symbols that are probed: a table of name, role, argument shape and detail.

Symbols are data: one BPF program per shape serves them all, and shape and detail travel in the attach cookie. The
un-versioned forms of calls that have a `_v2` take 32-bit device pointers and are used by nobody; they are left out.
Shapes are the enums of bpf/launch.h, memory.h, copy.h, context.h. Source: CUDA driver API reference 12 and 13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a symbol does for us; decides which programs are attached at its entry and its return."""

    LAUNCH = "launch"
    ALLOC = "alloc"
    FREE = "free"
    COPY = "copy"
    COPY_WAIT = "copy_wait"  # a copy that returns when it is done: also a wait
    WAIT = "wait"
    CONTEXT = "context"
    CONTEXT_MADE = "context_made"  # its result is an out-parameter, so the return matters


PROGRAMS: dict[Role, tuple[str, str | None]] = {  # entry, return
    Role.LAUNCH: ("launch_enter", None),
    Role.ALLOC: ("memory_enter", "memory_alloc_return"),
    Role.FREE: ("memory_enter", "memory_free_return"),
    Role.COPY: ("copy_enter", None),
    Role.COPY_WAIT: ("copy_wait_enter", "wait_return"),
    Role.WAIT: ("wait_enter", "wait_return"),
    Role.CONTEXT: ("context_enter", None),
    Role.CONTEXT_MADE: ("context_enter", "context_return"),
}

_LAUNCH_ARGUMENTS, _LAUNCH_CONFIG, _LAUNCH_GRAPH = 1, 2, 3
_ALLOC_POINTER_SIZE, _ALLOC_PITCH, _FREE_POINTER, _ALLOC_PHYSICAL = range(1, 5)
_PLAIN, _MANAGED, _POOL, _VIRTUAL = range(4)
_BYTES_3, _BYTES_5, _2D, _ELEMENTS_1, _ELEMENTS_2, _ELEMENTS_4, _BYTES_2 = range(1, 8)
_TO_DEVICE, _TO_HOST, _ON_DEVICE, _UNKNOWN, _MEMSET = range(5)
_RETAIN, _CREATE_3, _CREATE_5, _CREATE_4, _SET, _PUSH, _POP = range(1, 8)


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported name. `cookie(library)` is what its probes are attached with."""

    name: str
    role: Role
    shape: int = 0
    detail: int = 0

    def cookie(self, library: int) -> int:
        """library: 16 bits, shape: 16 bits, detail: 32 bits (bpf/abi.h)."""
        return library | self.shape << 16 | self.detail << 32


def _table() -> Iterator[Symbol]:
    for name, shape in (
        ("cuLaunchKernel", _LAUNCH_ARGUMENTS),
        ("cuLaunchCooperativeKernel", _LAUNCH_ARGUMENTS),
        ("cuLaunchKernelEx", _LAUNCH_CONFIG),
        ("cuGraphLaunch", _LAUNCH_GRAPH),
    ):
        yield from _streams(name, Role.LAUNCH, shape)
    yield from _memory()
    yield from _copies()
    yield from (Symbol("cuCtxSynchronize", Role.WAIT), Symbol("cuCtxSynchronize_v2", Role.WAIT))
    yield from _streams("cuStreamSynchronize", Role.WAIT)
    yield Symbol("cuEventSynchronize", Role.WAIT)
    yield Symbol("cuDevicePrimaryCtxRetain", Role.CONTEXT_MADE, _RETAIN)
    for suffix, shape in (("_v2", _CREATE_3), ("_v3", _CREATE_5), ("_v4", _CREATE_4)):
        yield Symbol(f"cuCtxCreate{suffix}", Role.CONTEXT_MADE, shape)
    yield Symbol("cuCtxSetCurrent", Role.CONTEXT, _SET)
    yield Symbol("cuCtxPushCurrent_v2", Role.CONTEXT, _PUSH)
    yield Symbol("cuCtxPopCurrent_v2", Role.CONTEXT, _POP)


def _memory() -> Iterator[Symbol]:
    yield Symbol("cuMemAlloc_v2", Role.ALLOC, _ALLOC_POINTER_SIZE, _PLAIN)
    yield Symbol("cuMemAllocPitch_v2", Role.ALLOC, _ALLOC_PITCH, _PLAIN)
    yield Symbol("cuMemAllocManaged", Role.ALLOC, _ALLOC_POINTER_SIZE, _MANAGED)
    yield from _streams("cuMemAllocAsync", Role.ALLOC, _ALLOC_POINTER_SIZE, _POOL)
    yield from _streams("cuMemAllocFromPoolAsync", Role.ALLOC, _ALLOC_POINTER_SIZE, _POOL)
    yield Symbol("cuMemCreate", Role.ALLOC, _ALLOC_PHYSICAL, _VIRTUAL)
    yield Symbol("cuMemFree_v2", Role.FREE, _FREE_POINTER)
    yield from _streams("cuMemFreeAsync", Role.FREE, _FREE_POINTER)
    yield Symbol("cuMemRelease", Role.FREE, _FREE_POINTER)


def _copies() -> Iterator[Symbol]:
    for direction, detail in (("HtoD", _TO_DEVICE), ("DtoH", _TO_HOST), ("DtoD", _ON_DEVICE)):
        yield from _streams(f"cuMemcpy{direction}Async_v2", Role.COPY, _BYTES_3, detail)
        role = Role.COPY if detail == _ON_DEVICE else Role.COPY_WAIT  # device to device returns at once
        yield from _blocking(f"cuMemcpy{direction}_v2", role, _BYTES_3, detail)
    yield from _streams("cuMemcpyAsync", Role.COPY, _BYTES_3, _UNKNOWN)
    yield from _blocking("cuMemcpy", Role.COPY_WAIT, _BYTES_3, _UNKNOWN)
    yield from _streams("cuMemcpyPeerAsync", Role.COPY, _BYTES_5, _ON_DEVICE)
    yield from _blocking("cuMemcpyPeer", Role.COPY, _BYTES_5, _ON_DEVICE)
    yield from _streams("cuMemcpy2DAsync_v2", Role.COPY, _2D, _UNKNOWN)
    yield from _blocking("cuMemcpy2D_v2", Role.COPY_WAIT, _2D, _UNKNOWN)
    yield from _blocking("cuMemcpy2DUnaligned_v2", Role.COPY_WAIT, _2D, _UNKNOWN)
    yield from _streams("cuMemPrefetchAsync", Role.COPY, _BYTES_2, _UNKNOWN)
    for bits, shape in ((8, _ELEMENTS_1), (16, _ELEMENTS_2), (32, _ELEMENTS_4)):
        yield from _blocking(f"cuMemsetD{bits}_v2", Role.COPY, shape, _MEMSET)
        yield from _streams(f"cuMemsetD{bits}Async", Role.COPY, shape, _MEMSET)


def _streams(name: str, role: Role, shape: int = 0, detail: int = 0) -> Iterator[Symbol]:
    """A call on a stream, and its per-thread-default-stream form."""
    yield Symbol(name, role, shape, detail)
    yield Symbol(f"{name}_ptsz", role, shape, detail)


def _blocking(name: str, role: Role, shape: int = 0, detail: int = 0) -> Iterator[Symbol]:
    """A call without a stream argument, and its per-thread-default-stream form."""
    yield Symbol(name, role, shape, detail)
    yield Symbol(f"{name}_ptds", role, shape, detail)


SYMBOLS: tuple[Symbol, ...] = tuple(_table())
