# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Launches per process, device and function from the map `launches`, and deliveries from the map `delivered`.

While `launches` is full, launches are counted in `other_launches`, under function 0: detail is lost, no launch is. A
node may have 50,000 functions of which a few run: only entries that changed since the last read become objects.

A delivery is what was launched between two drained waits, and how long that took. The kernel keeps the last 16 per
process; of a process that waits more often than that between two reads, the rest is not seen: they are a sample.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable
from typing import Final

from agent.collectors.samples import CountedSince, Delivered, LaunchCount, Probed
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.model import ProcessId
from agent.probes.abi import (
    DELIVERED_FUNCTIONS,
    DELIVERIES,
    DEVICE_UNKNOWN,
    Delivery,
    LaunchKey,
    LaunchValue,
    ProcessKey,
)
from agent.probes.abi import Deliveries as Ring
from agent.probes.libbpf import Map
from agent.probes.libcuda import LibcudaProbes

_KEY: Final = struct.Struct("=IIIxxxxQ")
_VALUE: Final = struct.Struct("=QQQQQQIxxxx")
_FIXED: Final = len(Delivery._fields_) - 1  # words before the functions
_DELIVERY: Final = struct.Struct(f"={_FIXED + 2 * DELIVERED_FUNCTIONS}Q")
_PROCESS: Final = struct.Struct("=II")
_COUNT: Final = struct.Struct("=Q")  # at the beginning of a ring
_RING_BYTES: Final = ctypes.sizeof(Ring)
_MARGIN_NS: Final = NS_PER_SECOND  # a launch gets its time as it enters the probe, and is counted a moment later

assert _KEY.size == ctypes.sizeof(LaunchKey)

assert _VALUE.size == ctypes.sizeof(LaunchValue)

assert _DELIVERY.size == ctypes.sizeof(Delivery)

assert _PROCESS.size == ctypes.sizeof(ProcessKey)

assert Ring.count.offset == 0

assert Delivered._fields[1:] == tuple(name for name, *_ in Delivery._fields_)


class Launches:
    """Reads both maps whole; remembers the keys of each process so that a dead one can be taken out of them."""

    name = "launches"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._maps = (probes.map("launches"), probes.map("other_launches"))
        self._keys: dict[ProcessId, dict[tuple[int, int], Map]] = {}
        self._read_ns = 0

    def collect(self, now_ns: int) -> Iterable[Probed | CountedSince | LaunchCount]:
        """One sample per process, and one per (process, device, function) that may have changed."""
        before_ns, read_ns = self._read_ns, monotonic_ns()
        stale_ns = before_ns - _MARGIN_NS
        if before_ns:
            yield CountedSince(read_ns, before_ns)
        processes: dict[tuple[int, int], ProcessId] = {}
        for counts in self._maps:
            for keys, values in counts.raw():
                for (tgid, start, device, function), value in zip(
                    _KEY.iter_unpack(keys), _VALUE.iter_unpack(values), strict=True
                ):
                    process = processes.get((tgid, start))
                    if process is None:
                        process = processes[tgid, start] = ProcessId(tgid, start)
                        yield Probed(process)
                    launches, kernels, blocks, waves, wave_sms, last_ns, threads = value
                    if last_ns < stale_ns:
                        continue
                    self._keys.setdefault(process, {})[device, function] = counts
                    ordinal = None if device == DEVICE_UNKNOWN else device
                    yield LaunchCount(process, ordinal, function, launches, kernels, blocks, threads, waves, wave_sms)
        self._read_ns = read_ns  # only now: after a read that failed, the entries that it did not reach are still new

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their entries."""
        for process in processes:
            for (device, function), counts in self._keys.pop(process, {}).items():
                counts.delete(LaunchKey((process.tgid, process.start_ticks & 0xFFFFFFFF), device, 0, function))


class DeliverySamples:
    """Yields each delivery once."""

    name = "deliveries"

    def __init__(self, probes: LibcudaProbes) -> None:
        self._map = probes.map("delivered")
        self._latencies = probes.map("latencies")
        self._seen: dict[ProcessId, int] = {}

    def collect(self, now_ns: int) -> Iterable[Delivered]:
        """The deliveries since the previous call, at most 16 per process."""
        before, self._seen = self._seen, {}  # processes that left the map are dropped here, too
        for keys, values in self._map.raw():
            for at, (tgid, start) in enumerate(_PROCESS.iter_unpack(keys)):
                process = ProcessId(tgid, start)
                (count,) = _COUNT.unpack_from(values, at * _RING_BYTES)
                seen = before.get(process, 0)
                self._seen[process] = count
                if count > seen:
                    yield from fresh(process, values[at * _RING_BYTES :], seen)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their rings and latency histograms."""
        for process in processes:
            self._seen.pop(process, None)
            self._map.delete(ProcessKey.of(process))
            self._latencies.delete(ProcessKey.of(process))


def fresh(process: ProcessId, ring: Ring | memoryview, seen: int) -> Iterable[Delivered]:
    """Those entries of a struct deliveries that came after the first `seen`."""
    (count,) = _COUNT.unpack_from(ring)
    for number in range(max(seen, count - DELIVERIES), count):
        words = _DELIVERY.unpack_from(ring, Ring.ring.offset + number % DELIVERIES * _DELIVERY.size)
        functions = zip(words[_FIXED::2], words[_FIXED + 1 :: 2], strict=True)
        yield Delivered._make((process, *words[:_FIXED], tuple([one for one in functions if one[1]])))
