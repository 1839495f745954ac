# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The driver API symbols that are probed: a table of name, role, argument shape and detail.

Symbols are data: one BPF program per shape serves them all, and shape and detail travel in the attach cookie. The
un-versioned forms of calls that have a `_v2` take 32-bit sizes and device pointers (CUDA 3.1 and before): `narrow`.
Shapes are the enums of bpf/*.h. Source: CUDA driver API reference 11 to 13; suffixes `_ptds` and `_ptsz` are what
programs call that were compiled for per-thread default streams.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from agent.node.elf import Extent


class SymbolRole(StrEnum):
    """What a symbol does for us; decides which programs are attached at its entry and its return."""

    LAUNCH = "launch"
    LAUNCH_MANY = "launch_many"
    GRAPH = "graph"
    NODE = "node"  # of a graph, which changes what it does
    ALLOC = "alloc"
    FREE = "free"
    MAPPING = "mapping"  # of physical memory
    COPY = "copy"
    COPY_LATE = "copy_late"  # its direction is known at its return
    PREFETCHES = "prefetches"  # a list of them
    COPY_WAIT = "copy_wait"  # returns when the data has arrived: also a wait
    WAIT = "wait"
    QUERY = "query"  # polled in a loop: a wait
    CONTEXT = "context"
    STREAM = "stream"  # streams, and events that tie them together
    NAME = "name"


PROGRAMS: dict[SymbolRole, tuple[str, str | None]] = {  # entry, return
    SymbolRole.LAUNCH: ("launch_enter", None),
    SymbolRole.LAUNCH_MANY: ("launch_many_enter", None),
    SymbolRole.GRAPH: ("graph_enter", "graph_return"),
    SymbolRole.NODE: ("node_enter", "node_return"),
    SymbolRole.ALLOC: ("memory_enter", "memory_alloc_return"),
    SymbolRole.FREE: ("memory_free_enter", "memory_free_return"),
    SymbolRole.MAPPING: ("mapping_enter", "mapping_return"),
    SymbolRole.COPY: ("copy_enter", None),
    SymbolRole.COPY_LATE: ("copy_enter", "copy_return"),
    SymbolRole.PREFETCHES: ("prefetches_enter", None),
    SymbolRole.COPY_WAIT: ("copy_wait_enter", "copy_wait_return"),
    SymbolRole.WAIT: ("wait_enter", "wait_return"),
    SymbolRole.QUERY: ("query_enter", "query_return"),
    SymbolRole.CONTEXT: ("context_enter", "context_return"),
    SymbolRole.STREAM: ("stream_enter", "stream_return"),
    SymbolRole.NAME: ("name_enter", "name_return"),
}

WITHOUT_RETURNS = frozenset({SymbolRole.LAUNCH, SymbolRole.LAUNCH_MANY})
"""Roles whose figures are whole without a return probe on any function. A part of the copies would be worse than none,
and what waits for a return that is not seen would wait for it forever.
"""

DENYING = "memory_enter_or_deny"  # in place of memory_enter, where the kernel lets it change registers

_LAUNCH_ARGUMENTS, _LAUNCH_CONFIG, _LAUNCH_GRAPH, _LAUNCH_LEGACY_1, _LAUNCH_LEGACY_3, _LAUNCH_MANY = range(1, 7)
_GRAPH_CREATE, _ADD_KERNEL, _ADD_MEMCPY, _ADD_MEMSET, _ADD_CHILD, _ADD_NODE, _ADD_NODE_6 = range(1, 8)
_GRAPH_CLONE, _GRAPH_INSTANTIATE, _GRAPH_UPDATE, _GRAPH_DESTROY = range(8, 12)
_NODE_OF_GRAPH, _NODE_OF_EXEC, _NODE_ENABLE, _NODE_DESTROY = range(1, 5)
_NODE_KERNEL, _NODE_MEMCPY, _NODE_MEMSET, _NODE_CHILD, _NODE_ANY = 0, 1, 2, 4, 0xFF
_CAPTURE_BEGIN, _CAPTURE_BEGIN_TO, _CAPTURE_END, _ADD_ALLOCATION, _ADD_FREE = range(12, 17)
_POINTER_SIZE, _PITCH, _PHYSICAL, _ARRAY, _ARRAY_3D, _MIPMAP, _REGISTER, _FREE = range(1, 9)
_HANDLE, _MAP, _UNMAP = range(1, 4)
_PLAIN, _MANAGED, _POOL, _VIRTUAL, _ARRAYS, _OF_GRAPH, _PINNED = range(7)
_MEMORY_NARROW = 1 << 8
_BYTES_2, _BYTES_3, _BYTES_4, _BYTES_5, _2D, _2D_NARROW, _3D, _3D_NARROW = range(1, 9)
_ELEMENTS, _ELEMENTS_2D, _UNIFIED, _BATCH, _PREFETCH, _PREFETCH_2, _BATCH_3D, _OPERATION_3D = range(9, 17)
_PEER, _3D_PEER, _PREFETCHES = range(17, 20)
_TO_DEVICE, _TO_HOST, _ON_DEVICE, _UNKNOWN, _MEMSET = range(5)
_COPY_NARROW = 1 << 16
_RETAIN, _CREATE_3, _CREATE_5, _CREATE_4, _SET, _PUSH, _POP = range(1, 8)
_CTX_DESTROY, _RELEASE, _RESET, _UUID, _UUID_2, _GREEN, _FROM_GREEN, _GREEN_DESTROY, _BUS_ID = range(8, 17)
_NAME_GET, _NAME_OF_KERNEL, _NAME_QUERIED = range(1, 4)
_WAIT_CONTEXT, _WAIT_STREAM, _WAIT_EVENT = range(1, 4)
_STREAM_CREATE, _STREAM_DESTROY, _STREAM_WAIT, _EVENT_RECORD, _EVENT_RECORD_FLAGS = range(1, 6)

_STREAM, _BLOCKING = "_ptsz", "_ptds"

STREAM_ARGUMENTS: dict[str, int] = {
    **dict.fromkeys(("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuMemcpyBatchAsync"), 9),
    **dict.fromkeys(("cuMemcpyBatchAsync_v2", "cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"), 8),
    **dict.fromkeys(("cuMemcpyPeerAsync", *(f"cuMemsetD2D{bits}Async" for bits in (8, 16, 32))), 6),
    **dict.fromkeys((f"cuMemcpy{name}Async{version}" for name in ("HtoA", "AtoH") for version in ("", "_v2")), 5),
    **dict.fromkeys(("cuMemcpy3DBatchAsync", "cuMemcpyWithAttributesAsync", "cuMemPrefetchAsync_v2"), 5),
    **dict.fromkeys((f"cuMemcpy{way}Async{v}" for way in ("HtoD", "DtoH", "DtoD") for v in ("", "_v2")), 4),
    **dict.fromkeys(("cuMemcpyAsync", "cuMemcpy3DBatchAsync_v2", "cuMemPrefetchAsync", "cuMemAllocFromPoolAsync"), 4),
    **dict.fromkeys(("cuLaunchGridAsync", *(f"cuMemsetD{bits}Async" for bits in (8, 16, 32))), 4),
    **dict.fromkeys(("cuMemcpy3DWithAttributesAsync", "cuMemAllocAsync"), 3),
    **dict.fromkeys((f"cuMemcpy{size}Async{version}" for size in ("2D", "3D") for version in ("", "_v2")), 2),
    **dict.fromkeys(("cuMemcpy3DPeerAsync", "cuMemFreeAsync", "cuGraphLaunch"), 2),
    **dict.fromkeys(("cuEventRecord", "cuEventRecordWithFlags"), 2),
    **dict.fromkeys(("cuStreamBeginCapture", "cuStreamBeginCapture_v2", "cuStreamBeginRecaptureToGraph"), 1),
    **dict.fromkeys(("cuStreamBeginCaptureToGraph", "cuStreamEndCapture", "cuStreamWaitEvent"), 1),
    **dict.fromkeys(("cuStreamDestroy", "cuStreamDestroy_v2"), 1),
}
"""Call → which argument, from 1, is its stream; without one it works in the default stream. cuLaunchKernelEx has it in
its configuration. Source: CUDA driver API reference.
"""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One exported name. `cookie(library)` is what its probes are attached with."""

    name: str
    role: SymbolRole
    shape: int = 0
    detail: int = 0

    def cookie(self, library: int) -> int:
        """Bits: library 16, shape 8, place of the stream 4, thread's default stream 4, detail 20, number 12 (abi.h)."""
        name = self.name.removesuffix(_STREAM).removesuffix(_BLOCKING)
        stream = STREAM_ARGUMENTS.get(name, 0) | (name != self.name) << 4
        return library | self.shape << 16 | stream << 24 | self.detail << 32 | NUMBERS[self.name] << 52


def _twice(name: str, suffix: str, role: SymbolRole, shape: int = 0, detail: int = 0) -> Iterator[Symbol]:
    """A call, and its form for per-thread default streams."""
    yield Symbol(name, role, shape, detail)
    yield Symbol(name + suffix, role, shape, detail)


def _launches() -> Iterator[Symbol]:
    for name, shape in (
        ("cuLaunchKernel", _LAUNCH_ARGUMENTS),
        ("cuLaunchCooperativeKernel", _LAUNCH_ARGUMENTS),
        ("cuLaunchKernelEx", _LAUNCH_CONFIG),
        ("cuGraphLaunch", _LAUNCH_GRAPH),
    ):
        yield from _twice(name, _STREAM, SymbolRole.LAUNCH, shape)
    yield Symbol("cuLaunchCooperativeKernelMultiDevice", SymbolRole.LAUNCH_MANY, _LAUNCH_MANY)
    yield Symbol("cuLaunch", SymbolRole.LAUNCH, _LAUNCH_LEGACY_1)
    yield Symbol("cuLaunchGrid", SymbolRole.LAUNCH, _LAUNCH_LEGACY_3)
    yield Symbol("cuLaunchGridAsync", SymbolRole.LAUNCH, _LAUNCH_LEGACY_3)


def _graphs() -> Iterator[Symbol]:
    for name, shape in (
        ("cuGraphCreate", _GRAPH_CREATE),
        ("cuGraphAddKernelNode", _ADD_KERNEL),
        ("cuGraphAddKernelNode_v2", _ADD_KERNEL),
        ("cuGraphAddMemcpyNode", _ADD_MEMCPY),
        ("cuGraphAddMemsetNode", _ADD_MEMSET),
        ("cuGraphAddChildGraphNode", _ADD_CHILD),
        ("cuGraphAddMemAllocNode", _ADD_ALLOCATION),
        ("cuGraphAddMemFreeNode", _ADD_FREE),
        ("cuGraphAddNode", _ADD_NODE),
        ("cuGraphAddNode_v2", _ADD_NODE_6),
        ("cuGraphClone", _GRAPH_CLONE),
        ("cuGraphInstantiate", _GRAPH_INSTANTIATE),
        ("cuGraphInstantiate_v2", _GRAPH_INSTANTIATE),
        ("cuGraphInstantiateWithFlags", _GRAPH_INSTANTIATE),
        ("cuGraphExecUpdate", _GRAPH_UPDATE),
        ("cuGraphExecUpdate_v2", _GRAPH_UPDATE),
        ("cuGraphDestroy", _GRAPH_DESTROY),
        ("cuGraphExecDestroy", _GRAPH_DESTROY),
    ):
        yield Symbol(name, SymbolRole.GRAPH, shape)
    for name, shape in (
        ("cuGraphInstantiateWithParams", _GRAPH_INSTANTIATE),
        ("cuStreamBeginCapture", _CAPTURE_BEGIN),
        ("cuStreamBeginCapture_v2", _CAPTURE_BEGIN),
        ("cuStreamBeginRecaptureToGraph", _CAPTURE_BEGIN),  # what is captured takes the place of what the graph held
        ("cuStreamBeginCaptureToGraph", _CAPTURE_BEGIN_TO),
        ("cuStreamEndCapture", _CAPTURE_END),
    ):
        yield from _twice(name, _STREAM, SymbolRole.GRAPH, shape)


def _nodes() -> Iterator[Symbol]:
    for name, kind in (
        ("KernelNodeSetParams", _NODE_KERNEL),
        ("KernelNodeSetParams_v2", _NODE_KERNEL),
        ("MemcpyNodeSetParams", _NODE_MEMCPY),
        ("MemsetNodeSetParams", _NODE_MEMSET),
        ("NodeSetParams", _NODE_ANY),
    ):
        yield Symbol(f"cuGraph{name}", SymbolRole.NODE, _NODE_OF_GRAPH, kind)
        yield Symbol(f"cuGraphExec{name}", SymbolRole.NODE, _NODE_OF_EXEC, kind)
    yield Symbol("cuGraphExecChildGraphNodeSetParams", SymbolRole.NODE, _NODE_OF_EXEC, _NODE_CHILD)
    yield Symbol("cuGraphNodeSetEnabled", SymbolRole.NODE, _NODE_ENABLE)
    yield Symbol("cuGraphDestroyNode", SymbolRole.NODE, _NODE_DESTROY)


def _memory() -> Iterator[Symbol]:
    yield from _allocations()
    yield Symbol("cuMemFree", SymbolRole.FREE, _FREE, _PLAIN | _MEMORY_NARROW)
    yield Symbol("cuMemFree_v2", SymbolRole.FREE, _FREE, _PLAIN)
    yield from _twice("cuMemFreeAsync", _STREAM, SymbolRole.FREE, _FREE, _POOL)
    yield Symbol("cuMemRelease", SymbolRole.FREE, _FREE, _VIRTUAL)
    yield Symbol("cuMemMap", SymbolRole.MAPPING, _MAP)
    yield Symbol("cuMemUnmap", SymbolRole.MAPPING, _UNMAP)
    yield Symbol("cuMemRetainAllocationHandle", SymbolRole.MAPPING, _HANDLE)
    yield Symbol("cuMemImportFromShareableHandle", SymbolRole.MAPPING, _HANDLE)
    yield Symbol("cuArrayDestroy", SymbolRole.FREE, _FREE, _ARRAYS)
    yield Symbol("cuMipmappedArrayDestroy", SymbolRole.FREE, _FREE, _ARRAYS)
    yield Symbol("cuMemFreeHost", SymbolRole.FREE, _FREE, _PINNED)
    yield Symbol("cuMemHostUnregister", SymbolRole.FREE, _FREE, _PINNED)


def _allocations() -> Iterator[Symbol]:
    for name, shape, kind in (
        ("cuMemAlloc", _POINTER_SIZE, _PLAIN),
        ("cuMemAllocPitch", _PITCH, _PLAIN),
        ("cuMemAllocHost", _POINTER_SIZE, _PINNED),
        ("cuArrayCreate", _ARRAY, _ARRAYS),
        ("cuArray3DCreate", _ARRAY_3D, _ARRAYS),
    ):
        yield Symbol(name, SymbolRole.ALLOC, shape, kind | _MEMORY_NARROW)
        yield Symbol(f"{name}_v2", SymbolRole.ALLOC, shape, kind)
    for name, shape, kind in (
        ("cuMemAllocManaged", _POINTER_SIZE, _MANAGED),
        ("cuMemCreate", _PHYSICAL, _VIRTUAL),
        ("cuMipmappedArrayCreate", _MIPMAP, _ARRAYS),
        ("cuMemHostAlloc", _POINTER_SIZE, _PINNED),
        ("cuMemHostRegister", _REGISTER, _PINNED),
        ("cuMemHostRegister_v2", _REGISTER, _PINNED),
    ):
        yield Symbol(name, SymbolRole.ALLOC, shape, kind)
    yield from _twice("cuMemAllocAsync", _STREAM, SymbolRole.ALLOC, _POINTER_SIZE, _POOL)
    yield from _twice("cuMemAllocFromPoolAsync", _STREAM, SymbolRole.ALLOC, _POINTER_SIZE, _POOL)


def _copies() -> Iterator[Symbol]:
    for name, shape, direction in (
        ("HtoD", _BYTES_3, _TO_DEVICE),
        ("DtoH", _BYTES_3, _TO_HOST),
        ("DtoD", _BYTES_3, _ON_DEVICE),
        ("HtoA", _BYTES_4, _TO_DEVICE),
        ("AtoH", _BYTES_4, _TO_HOST),
        ("DtoA", _BYTES_4, _ON_DEVICE),
        ("AtoD", _BYTES_4, _ON_DEVICE),
        ("AtoA", _BYTES_5, _ON_DEVICE),
    ):
        blocks = (
            SymbolRole.COPY if direction == _ON_DEVICE else SymbolRole.COPY_WAIT
        )  # device to device returns at once
        yield from _since_3_2(f"cuMemcpy{name}", _BLOCKING, blocks, shape, direction)
        if name not in ("DtoA", "AtoD", "AtoA"):
            yield from _since_3_2(f"cuMemcpy{name}Async", _STREAM, SymbolRole.COPY, shape, direction)
    yield from _twice("cuMemcpy", _BLOCKING, SymbolRole.COPY_WAIT, _UNIFIED, _UNKNOWN)
    yield from _twice("cuMemcpyAsync", _STREAM, SymbolRole.COPY_LATE, _UNIFIED, _UNKNOWN)
    yield from _twice("cuMemcpyPeer", _BLOCKING, SymbolRole.COPY, _PEER, _ON_DEVICE)
    yield from _twice("cuMemcpyPeerAsync", _STREAM, SymbolRole.COPY, _PEER, _ON_DEVICE)
    yield from _twice("cuMemcpyBatchAsync", _STREAM, SymbolRole.COPY_LATE, _BATCH, _UNKNOWN)
    yield from _twice("cuMemcpyBatchAsync_v2", _STREAM, SymbolRole.COPY_LATE, _BATCH, _UNKNOWN)
    yield from _twice("cuMemcpyWithAttributesAsync", _STREAM, SymbolRole.COPY_LATE, _UNIFIED, _UNKNOWN)
    yield from _twice("cuMemcpy3DBatchAsync", _STREAM, SymbolRole.COPY_LATE, _BATCH_3D, _UNKNOWN)
    yield from _twice("cuMemcpy3DBatchAsync_v2", _STREAM, SymbolRole.COPY_LATE, _BATCH_3D, _UNKNOWN)
    yield from _twice("cuMemcpy3DWithAttributesAsync", _STREAM, SymbolRole.COPY_LATE, _OPERATION_3D, _UNKNOWN)
    yield from _twice("cuMemPrefetchBatchAsync", _STREAM, SymbolRole.PREFETCHES, _PREFETCHES, _TO_DEVICE)
    yield from _twice("cuMemDiscardAndPrefetchBatchAsync", _STREAM, SymbolRole.PREFETCHES, _PREFETCHES, _TO_DEVICE)
    yield from _twice("cuMemPrefetchAsync", _STREAM, SymbolRole.COPY, _PREFETCH, _TO_DEVICE)
    yield from _twice("cuMemPrefetchAsync_v2", _STREAM, SymbolRole.COPY, _PREFETCH_2, _TO_DEVICE)
    yield from _rectangles()
    yield from _memsets()


def _since_3_2(name: str, suffix: str, role: SymbolRole, shape: int, detail: int) -> Iterator[Symbol]:
    yield Symbol(name, role, shape, detail | _COPY_NARROW)
    yield from _twice(f"{name}_v2", suffix, role, shape, detail)


def _rectangles() -> Iterator[Symbol]:
    for name, suffix, role, wide, narrow in (
        ("cuMemcpy2D", _BLOCKING, SymbolRole.COPY_WAIT, _2D, _2D_NARROW),
        ("cuMemcpy2DUnaligned", _BLOCKING, SymbolRole.COPY_WAIT, _2D, _2D_NARROW),
        ("cuMemcpy2DAsync", _STREAM, SymbolRole.COPY_LATE, _2D, _2D_NARROW),
        ("cuMemcpy3D", _BLOCKING, SymbolRole.COPY_WAIT, _3D, _3D_NARROW),
        ("cuMemcpy3DAsync", _STREAM, SymbolRole.COPY_LATE, _3D, _3D_NARROW),
    ):
        yield Symbol(name, role, narrow, _UNKNOWN)
        yield from _twice(f"{name}_v2", suffix, role, wide, _UNKNOWN)
    yield from _twice("cuMemcpy3DPeer", _BLOCKING, SymbolRole.COPY_WAIT, _3D_PEER, _UNKNOWN)
    yield from _twice("cuMemcpy3DPeerAsync", _STREAM, SymbolRole.COPY_LATE, _3D_PEER, _UNKNOWN)


def _memsets() -> Iterator[Symbol]:
    for bits in (8, 16, 32):
        for name, shape in ((f"cuMemsetD{bits}", _ELEMENTS), (f"cuMemsetD2D{bits}", _ELEMENTS_2D)):
            detail = _MEMSET | bits // 8 << 8
            yield from _since_3_2(name, _BLOCKING, SymbolRole.COPY, shape, detail)
            yield from _twice(f"{name}Async", _STREAM, SymbolRole.COPY, shape, detail)


def _contexts() -> Iterator[Symbol]:
    for name, shape in (
        ("cuDevicePrimaryCtxRetain", _RETAIN),
        ("cuDevicePrimaryCtxRelease", _RELEASE),
        ("cuDevicePrimaryCtxRelease_v2", _RELEASE),
        ("cuDevicePrimaryCtxReset", _RESET),
        ("cuDevicePrimaryCtxReset_v2", _RESET),
        ("cuCtxCreate", _CREATE_3),
        ("cuCtxCreate_v2", _CREATE_3),
        ("cuCtxCreate_v3", _CREATE_5),
        ("cuCtxCreate_v4", _CREATE_4),
        ("cuCtxSetCurrent", _SET),
        ("cuCtxPushCurrent", _PUSH),
        ("cuCtxPushCurrent_v2", _PUSH),
        ("cuCtxPopCurrent", _POP),
        ("cuCtxPopCurrent_v2", _POP),
        ("cuCtxDestroy", _CTX_DESTROY),
        ("cuCtxDestroy_v2", _CTX_DESTROY),
        ("cuDeviceGetUuid", _UUID),
        ("cuDeviceGetUuid_v2", _UUID_2),
        ("cuDeviceGetByPCIBusId", _BUS_ID),
        ("cuGreenCtxCreate", _GREEN),
        ("cuCtxFromGreenCtx", _FROM_GREEN),
        ("cuGreenCtxDestroy", _GREEN_DESTROY),
    ):
        yield Symbol(name, SymbolRole.CONTEXT, shape)


def _waits() -> Iterator[Symbol]:
    yield Symbol("cuCtxSynchronize", SymbolRole.WAIT, _WAIT_CONTEXT)
    yield Symbol("cuCtxSynchronize_v2", SymbolRole.WAIT, _WAIT_CONTEXT)
    yield from _twice("cuStreamSynchronize", _STREAM, SymbolRole.WAIT, _WAIT_STREAM)
    yield Symbol("cuEventSynchronize", SymbolRole.WAIT, _WAIT_EVENT)
    yield from _twice("cuStreamQuery", _STREAM, SymbolRole.QUERY, _WAIT_STREAM)
    yield Symbol("cuEventQuery", SymbolRole.QUERY, _WAIT_EVENT)


def _streams() -> Iterator[Symbol]:
    yield Symbol("cuStreamCreate", SymbolRole.STREAM, _STREAM_CREATE)
    yield Symbol("cuStreamCreateWithPriority", SymbolRole.STREAM, _STREAM_CREATE)
    yield Symbol("cuStreamDestroy", SymbolRole.STREAM, _STREAM_DESTROY)
    yield Symbol("cuStreamDestroy_v2", SymbolRole.STREAM, _STREAM_DESTROY)
    yield from _twice("cuStreamWaitEvent", _STREAM, SymbolRole.STREAM, _STREAM_WAIT)
    yield from _twice("cuEventRecord", _STREAM, SymbolRole.STREAM, _EVENT_RECORD)
    yield from _twice("cuEventRecordWithFlags", _STREAM, SymbolRole.STREAM, _EVENT_RECORD_FLAGS)


def _names() -> Iterator[Symbol]:
    yield Symbol("cuModuleGetFunction", SymbolRole.NAME, _NAME_GET)
    yield Symbol("cuLibraryGetKernel", SymbolRole.NAME, _NAME_GET)
    yield Symbol("cuKernelGetFunction", SymbolRole.NAME, _NAME_OF_KERNEL)
    yield Symbol("cuFuncGetName", SymbolRole.NAME, _NAME_QUERIED)
    yield Symbol("cuKernelGetName", SymbolRole.NAME, _NAME_QUERIED)


SYMBOLS: tuple[Symbol, ...] = (
    *_launches(),
    *_graphs(),
    *_nodes(),
    *_memory(),
    *_copies(),
    *_contexts(),
    *_waits(),
    *_names(),
    *_streams(),
)

NUMBERS = {symbol.name: number for number, symbol in enumerate(SYMBOLS)}
_VERSION = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")
_BASES = frozenset(_VERSION.sub("", symbol.name) for symbol in SYMBOLS)
_NAMES = frozenset(symbol.name for symbol in SYMBOLS)
_MOST_UNKNOWN = 64  # a file may have any number of such names


def by_offset(symbols: Iterable[Symbol], extents: Mapping[str, Extent]) -> dict[int, Symbol]:
    """The symbols that a file has, by file offset; of two names of one function the first, as they are one probe."""
    found: dict[int, Symbol] = {}
    for symbol in symbols:
        if symbol.name in extents:
            found.setdefault(extents[symbol.name].offset, symbol)
    return found


def unknown_versions(exports: Collection[str]) -> list[str]:
    """Exports named as newer versions of probed calls: their arguments are unknown, so they are not probed."""
    found = (name for name in exports if name not in _NAMES and _VERSION.sub("", name) in _BASES)
    return sorted(found)[:_MOST_UNKNOWN]


def is_on_device(symbol: Symbol) -> bool:
    """False for allocations and frees of arrays, whose size is in a descriptor, of host memory, and of CUDA 3.1."""
    if symbol.role not in (SymbolRole.ALLOC, SymbolRole.FREE):
        return True
    return symbol.detail in (_PLAIN, _MANAGED, _POOL, _VIRTUAL)
