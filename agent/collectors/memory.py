# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Live memory and copied bytes per process, from the maps `memory` (sums), `allocations` (ages) and `copies`.

What a context held is no longer in the sums from the moment that it ends. Its allocations are taken out of the map
here, as the kernel would have to look through all of the node's in the program's own call.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from agent.collectors.samples import AGES_SECONDS, AllocationCount, CopyCount, LiveByAge, Probed
from agent.core.clock import NS_PER_SECOND
from agent.core.model import ProcessId
from agent.probes.abi import (
    COPY_DIRECTIONS,
    DEVICE_UNKNOWN,
    MEMORY_KINDS,
    PINNED,
    Allocation,
    AllocationKey,
    CopyKey,
    MemoryKey,
)
from agent.probes.libcuda import LibcudaProbes

_KEY: Final = struct.Struct("=IIIxxxxQ")
_VALUE: Final = struct.Struct("=QQQIIII")
_AGES_EVERY_NS: Final = 30 * NS_PER_SECOND  # reading a hundred thousand allocations takes a while
_Context = tuple[int, int, int]  # of a process: its tgid, its start, the handle

assert _KEY.size == ctypes.sizeof(AllocationKey)

assert _VALUE.size == ctypes.sizeof(Allocation)


class Allocations:
    """Reads the sums at every tick, the ages now and then."""

    name = "allocations"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._probes = probes
        self._sums = probes.map("memory")
        self._single = probes.map("allocations")
        self._mappings = probes.map("mappings")
        self._contexts = probes.map("context_memories")
        self._ended_ns: dict[_Context, int] = {}  # what is older was taken out
        self._keys: dict[ProcessId, list[MemoryKey]] = {}
        self._ages: tuple[LiveByAge, ...] = ()
        self._ages_ns = -_AGES_EVERY_NS

    def collect(self, now_ns: int) -> Iterable[Probed | AllocationCount | LiveByAge]:
        """One sample per (process, device), and the ages as they were last read."""
        self._keys = {}
        self._probes.expire_charges()
        self._take_out_ended()
        for key, value in self._sums.items():
            process = key.process.id()
            self._keys.setdefault(process, []).append(key)
            live = {kind: size for kind, size in zip(MEMORY_KINDS, value.live_bytes, strict=True) if size}
            yield Probed(process)
            yield AllocationCount(process, _ordinal(key.device), live, value.peak_bytes, value.failures)
        if now_ns - self._ages_ns >= _AGES_EVERY_NS:
            self._ages, self._ages_ns = tuple(self._by_age(now_ns)), now_ns
        yield from self._ages

    def _take_out_ended(self) -> None:
        """The allocations of contexts that ended; these are forgotten a tick later, unless there are others by then."""
        ended: dict[_Context, int] = {}
        for key, sums in self._contexts.items():
            context = (key.process.tgid, key.process.start_ticks, key.context)
            if not sums.ended_ns:
                continue
            if self._ended_ns.get(context) != sums.ended_ns or sums.allocations:
                ended[context] = sums.ended_ns
            else:
                self._contexts.delete(key)
        new = {context for context, ended_ns in ended.items() if self._ended_ns.get(context) != ended_ns}
        self._ended_ns = ended
        if not new:
            return
        for key in list(self._older_than(ended)):
            single = self._single.get(key)
            if single is None:
                continue
            context = (key.process.tgid, key.process.start_ticks, single.context)
            if single.at_ns <= ended.get(context, -1):  # no other has come in its place
                self._single.delete(key)

    def _older_than(self, ended: Mapping[_Context, int]) -> Iterable[AllocationKey]:
        for keys, values in self._single.raw():
            for index, ((tgid, start, _, _), (_, at_ns, context, *_)) in enumerate(
                zip(_KEY.iter_unpack(keys), _VALUE.iter_unpack(values), strict=True)
            ):
                if at_ns <= ended.get((tgid, start, context), -1):
                    yield AllocationKey.from_buffer_copy(keys, index * _KEY.size)

    def _by_age(self, now_ns: int) -> Iterable[LiveByAge]:
        bounds = [seconds * NS_PER_SECOND for seconds in AGES_SECONDS]
        found: dict[tuple[int, int, int], list[int]] = defaultdict(lambda: [0] * (len(bounds) + 1))
        for keys, values in self._single.raw():
            for (tgid, start, _, _), (size, at_ns, _, device, kind, _, _) in zip(
                _KEY.iter_unpack(keys), _VALUE.iter_unpack(values), strict=True
            ):
                if kind != PINNED:
                    found[tgid, start, device][bisect_right(bounds, now_ns - at_ns)] += size
        for (tgid, start, device), sizes in found.items():
            yield LiveByAge(ProcessId(tgid, start), _ordinal(device), tuple(sizes))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes the processes' sums, and the allocations and mappings that they had not freed when they ended."""
        live = False
        for process in processes:
            for key in self._keys.pop(process, ()):
                sums = self._sums.get(key)
                live |= sums is not None and sums.allocations != sums.frees
                self._sums.delete(key)
        dead = {(process.tgid, process.start_ticks) for process in processes}
        for key, sums in list(self._contexts.items()):
            if (key.process.tgid, key.process.start_ticks) in dead:
                live |= sums.ended_ns != 0  # what it held may not have been taken out yet
                self._contexts.delete(key)
        if not live:
            return
        for singles in (self._single, self._mappings):
            for key, _ in list(singles.items()):
                if (key.process.tgid, key.process.start_ticks) in dead:
                    singles.delete(key)


def _ordinal(device: int) -> int | None:
    return None if device == DEVICE_UNKNOWN else device


class Copies:
    """Reads the whole map; it has at most seven entries per process and device."""

    name = "copies"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._map = probes.map("copies")
        self._keys: dict[ProcessId, list[CopyKey]] = {}

    def collect(self, now_ns: int) -> Iterable[Probed | CopyCount]:
        """One sample per (process, device, direction)."""
        self._keys = {}
        for key, value in self._map.items():
            process = key.process.id()
            self._keys.setdefault(process, []).append(key)
            ordinal = None if key.device == DEVICE_UNKNOWN else key.device
            yield Probed(process)
            yield CopyCount(process, ordinal, COPY_DIRECTIONS[key.direction], value.bytes, value.calls)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their entries."""
        for process in processes:
            for key in self._keys.pop(process, ()):
                self._map.delete(key)
