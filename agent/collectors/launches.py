# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Launches per process, device and function, out of the map `launches`.

While that is full, launches are counted in `other_launches`, under function 0: detail is lost, no launch is. A node may
have 50,000 functions of which a few run: only entries that changed since the last read become objects.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable
from typing import Final

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.layout import DEVICE_UNKNOWN, LaunchKey, LaunchValue
from agent.libbpf import Map
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import CountedSince, LaunchCount, Probed

_KEY: Final = struct.Struct("=IIIxxxxQ")
_VALUE: Final = struct.Struct("=QQQQQQIxxxx")
_MARGIN_NS: Final = NS_PER_SECOND  # a launch is stamped as it enters the probe, and counted a moment later
assert _KEY.size == ctypes.sizeof(LaunchKey)
assert _VALUE.size == ctypes.sizeof(LaunchValue)


class Launches:
    """Reads both maps whole; remembers the keys of each process so that a dead one can be taken out of them."""

    name = "launches"

    def __init__(self, probes: Probes) -> None:
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
        self._read_ns = read_ns  # only now: after a read that failed, what it did not come to is still new

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their entries."""
        for process in processes:
            for (device, function), counts in self._keys.pop(process, {}).items():
                counts.delete(LaunchKey((process.tgid, process.start_ticks & 0xFFFFFFFF), device, 0, function))
