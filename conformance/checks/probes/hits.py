# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How often functions of libcuda are entered, on the whole machine: those that are probed, and all like them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.errors import ProbeError
from agent.node.elf import exported_extents
from agent.node.instructions import EntryInstruction, places
from agent.probes.abi import U32, U64
from agent.probes.attachment import ProbedFunction
from agent.probes.libbpf import Map, load_uprobes
from agent.probes.symbols import SYMBOLS, Symbol, SymbolRole
from tools.harness.uprobes import attached

MOST: Final = 4096  # places: hits.bpf.c
# What may launch, allocate, copy, free or wait.
LIKELY: Final = re.compile(r"cu\w*(Launch|Memcpy|Memset|Alloc|Free|Synchronize|Graph|Prefetch|MemCreate|MemRelease)")
_HARMLESS: Final = re.compile(
    r"cu\w*Get|cu\w*SetAttribute|cuDeviceSetGraphMemAttribute|cuMemAddress(Reserve|Free)|cuMemPool|cuLaunchHostFunc"
    r"|cuGraphics|cuGraphAdd(Dependencies|(Empty|Host|Event\w+|ExternalSemaphores\w+|BatchMemOp)Node)"
    r"|cuGraph\w*(Host|ExternalSemaphores\w+|BatchMemOp)NodeSetParams|cuGraph\w*NodeSetEvent"
    r"|cuGraphUpload|cuGraphDebugDotPrint|cuGraphNodeFindInClone|cuGraphKernelNodeCopyAttributes"
    r"|cuGraph(Retain|Release)UserObject|cuGraphRemoveDependencies"
)
# The agent counts what a graph holds while it is made, and follows the changes of its nodes that it has probes for.
_RESIZING: Final = re.compile(r"cuGraph\w*NodeSetParams")  # as many nodes, perhaps of other sizes
_RECOUNTING: Final = re.compile(r"cuGraphNodeSetEnabled|cuGraphDestroyNode|cuGraphConditionalHandleCreate")
_SYMBOLS: Final[Mapping[str, Symbol]] = {symbol.name: symbol for symbol in SYMBOLS}
_COPIES: Final = (SymbolRole.COPY, SymbolRole.COPY_LATE, SymbolRole.COPY_WAIT, SymbolRole.PREFETCHES)
KINDS: Final = ("launches", "graph launches", "copies", "memsets", "allocations", "frees", "waits")


def kind_of(name: str) -> str | None:
    """What the agent counts a call of this probed symbol as; None: as nothing of these, or it is not probed."""
    symbol = _SYMBOLS.get(name)
    if symbol is None:
        return None
    if symbol.role in (SymbolRole.LAUNCH, SymbolRole.LAUNCH_MANY):
        return "graph launches" if name.startswith("cuGraphLaunch") else "launches"
    if symbol.role in _COPIES:
        return "memsets" if name.startswith("cuMemset") else "copies"
    kinds = {SymbolRole.ALLOC: "allocations", SymbolRole.FREE: "frees", SymbolRole.WAIT: "waits"}
    return kinds.get(symbol.role)


def counted(hits: Mapping[str, int]) -> dict[str, int]:
    """Counts by kind, as the agent would have made them."""
    found = dict.fromkeys(KINDS, 0)
    for name, count in hits.items():
        kind = kind_of(name)
        if kind is not None:
            found[kind] += count
    return found


def unprobed(hits: Mapping[str, int]) -> dict[str, int]:
    """What was called, may launch, allocate, copy or wait, and has no probe. Without `graph_changes`."""
    return {
        name: count
        for name, count in hits.items()
        if name not in _SYMBOLS
        and LIKELY.match(name)
        and not any(others.match(name) for others in (_HARMLESS, _RESIZING, _RECOUNTING))
    }


def graph_changes(hits: Mapping[str, int]) -> dict[str, int]:
    """What was called that has a graph's launches do other things than the agent counted, and has no probe."""
    return {
        name: count
        for name, count in hits.items()
        if name not in _SYMBOLS and not _HARMLESS.match(name) and (_RESIZING.match(name) or _RECOUNTING.match(name))
    }


def recounts(name: str) -> bool:
    """Whether, after this call, a graph's launch may run another number of kernels than the agent counted."""
    return name not in _SYMBOLS and _RECOUNTING.match(name) is not None


def watched(exports: Mapping[str, int]) -> dict[int, str]:
    """Offset → name of what is watched; of two names of one function the probed one."""
    found: dict[int, str] = {}
    for name in sorted(exports, key=lambda name: (name not in _SYMBOLS, name)):
        if name in _SYMBOLS or LIKELY.match(name):
            found.setdefault(exports[name], name)
    return found


@dataclass(frozen=True, slots=True)
class Hits:
    """Counting probes on a library."""

    names: tuple[str, ...]  # of the probes, by number
    failed: Mapping[str, str]  # places that could not be probed, and why
    _map: Map

    def read(self) -> dict[str, int]:
        """Calls of each since the probes were attached; those that were never called are left out."""
        counts = self._map.per_cpu_array(len(self.names))
        return {name: count for name, count in zip(self.names, counts, strict=True) if count}


def between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Calls from one reading to the next."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


@contextmanager
def counting(built: Path, libcuda: Path) -> Iterator[Hits]:
    """Counts until the end of the block. ProbeError, SetupError, OSError."""
    names: list[str] = []
    failed: dict[str, str] = {}

    def functions(descriptor: int) -> list[ProbedFunction]:
        extents = exported_extents(descriptor, "cu")
        wanted = watched({name: extent.offset for name, extent in extents.items()})
        if len(wanted) > MOST:
            raise ProbeError(f"{libcuda} has {len(wanted)} functions to watch, more than {MOST}")
        found = places(descriptor, extents.values())
        refused = [at for at in wanted if found[at].instruction is EntryInstruction.REFUSED]
        failed.update({wanted.pop(at): "no probe on such an instruction" for at in refused})
        names.extend(wanted.values())
        return [
            ProbedFunction(name, at, number, "count", None, found[at])
            for number, (at, name) in enumerate(wanted.items())
        ]

    with load_uprobes(built, {"count"}) as bpf, attached(bpf, libcuda, functions) as attachment:
        yield Hits(tuple(names), failed | attachment.failed, bpf.map("hits", U32, U64))
