# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who is on a device, and each one's share of its time, as NVML tells it.

Process lists are merged so that a process is there once. Utilisation samples pass three checks (at most 100 %, newer
than the last one seen of this device, process still listed) because NVML hands out stale and impossible ones now and
then. A process without a sample is unknown, not idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

from agent.nvml.calls import Calls

LISTS: Final = tuple(
    tuple(f"nvmlDeviceGet{kind}RunningProcesses_{version}" for version in ("v3", "v2"))
    for kind in ("Compute", "Graphics", "MPSCompute")
)
UTILIZATION: Final = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
FIRST_LOOK_US: Final = 1_000_000  # 0 would return the driver's whole buffer: minutes that nobody asked for
AHEAD_US: Final = 5_000_000  # a timestamp further ahead of the clock than this would silence a device for good


def running(calls: Calls, owner: str, handle: Any) -> tuple[list[tuple[int, int | None]], frozenset[int]]:
    """(tgid, used bytes) of each process in any of the three lists, and the tgids of those that are MPS clients.

    A process in two lists has the same bytes in both.
    """
    merged: dict[int, int | None] = {}
    tgids: set[int] = set()
    for names in LISTS:
        tgids = set()
        for process in calls.first(owner, names, handle) or ():
            tgid, used = int(process.pid), process.usedGpuMemory
            known = merged.get(tgid)
            merged[tgid] = known if used is None else max(int(used), known or 0)
            tgids.add(tgid)
    return list(merged.items()), frozenset(tgids)  # the last list is that of MPS


class ProcessUtilization:
    """The utilisation samples of one device."""

    def __init__(self, calls: Calls, owner: str) -> None:
        self._calls, self._owner = calls, owner
        self._last_seen_us: int | None = None

    def read(self, handle: Any, listed: Collection[int], wall_us: int) -> dict[int, float]:
        """tgid → share of time with a kernel of it running (0–1, mean of the new samples). Sums can pass 1."""
        since = wall_us - FIRST_LOOK_US if self._last_seen_us is None else self._last_seen_us
        samples = self._calls.first(self._owner, UTILIZATION, handle, since) or ()
        found: defaultdict[int, list[int]] = defaultdict(list)
        newest = since
        for sample in samples:
            stamp, percent = int(sample.timeStamp), int(sample.smUtil)
            if not since < stamp <= wall_us + AHEAD_US or percent > 100:
                self._calls.errors[f"{UTILIZATION[0]}:implausible_sample"] += 1
                continue
            newest = max(newest, stamp)
            if sample.pid in listed:
                found[int(sample.pid)].append(percent)
        self._last_seen_us = newest
        return {tgid: sum(values) / len(values) / 100 for tgid, values in found.items()}
