# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""NVML's utilisation samples while something known runs: who is in them, how much, how often, how old.

A sample is first seen by one of many looks, so its age is too large by half of the time between looks in the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from conformance.checks.nvml.binding import Gpu, Refused, asked

OLD: Final = "nvmlDeviceGetProcessUtilization"
NEW: Final = "nvmlDeviceGetProcessesUtilizationInfo"
DEVICE: Final = "nvmlDeviceGetSamples"
LOOK_SECONDS: Final = 0.05
DEVICE_ITSELF: Final = 0  # in place of a pid


@dataclass(frozen=True, slots=True)
class Sample:
    """`stamp_us` and `seen_us` are CLOCK_REALTIME; `percent` of time with a kernel running."""

    seen_us: int
    stamp_us: int
    pid: int
    percent: int


@dataclass(slots=True)
class Samples:
    """What one call gave over a while. `refused`: NVML's last error other than that there is nothing new."""

    call: str
    begin_us: int
    found: list[Sample] = field(default_factory=list)
    refused: str = ""
    looks: int = 0
    _newest_us: int = 0

    @property
    def supported(self) -> bool:
        """Whether the call works: it may have given no sample, but refused nothing."""
        return not self.refused

    def look(self, gpu: Gpu) -> None:
        """Reads the samples since the last look."""
        self.looks += 1
        since = self._newest_us or self.begin_us
        answer = asked(gpu.api, lambda: _READERS[self.call](gpu, since))
        if isinstance(answer, Refused):
            if not _says_nothing_new(gpu, answer):
                self.refused = answer.why
            return
        now_us = time.time_ns() // 1000
        fresh = [Sample(now_us, stamp, pid, percent) for stamp, pid, percent in answer if stamp > since]
        self.found += fresh
        self._newest_us = max([since, *(sample.stamp_us for sample in fresh)])

    def pids(self) -> set[int]:
        """Processes in any of the samples."""
        return {sample.pid for sample in self.found}

    def mean_ratio(self, pid: int, after_us: int = 0) -> float | None:
        """0–1; None without a sample after that time."""
        values = [s.percent / 100 for s in self.found if s.pid == pid and s.stamp_us > after_us]
        return fmean(values) if values else None

    def period_seconds(self) -> float | None:
        """From one sample of a process to its next one, the median; None before there are two of any."""
        return median(gaps) if (gaps := [gap for pid in self.pids() for gap in self._gaps(pid)]) else None

    def ages_ms(self) -> list[float]:
        """How old each was when it was first seen, in order."""
        return sorted((sample.seen_us - sample.stamp_us) / 1e3 for sample in self.found)

    def _gaps(self, pid: int) -> list[float]:
        stamps = sorted({sample.stamp_us for sample in self.found if sample.pid == pid})
        return [(after - before) / 1e6 for before, after in pairwise(stamps)]


def poll(gpu: Gpu, seconds: float, each_look: Callable[[], None] = lambda: None) -> dict[str, Samples]:
    """All three calls, side by side, each with its own time of the newest sample."""
    begin_us = time.time_ns() // 1000
    all_of_them = {call: Samples(call, begin_us) for call in (OLD, NEW, DEVICE)}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for one in all_of_them.values():
            one.look(gpu)
        each_look()
        time.sleep(LOOK_SECONDS)
    return all_of_them


def largest_difference(one: Samples, other: Samples) -> float | None:
    """Between the means of the same process by two calls, 0–1; None where no process is in both."""
    shared = one.pids() & other.pids()
    differences = [abs((one.mean_ratio(pid) or 0.0) - (other.mean_ratio(pid) or 0.0)) for pid in shared]
    return max(differences, default=None)


def _of_processes(found: Iterable[Any]) -> list[tuple[int, int, int]]:
    return [(int(one.timeStamp), int(one.pid), int(one.smUtil)) for one in found if one.smUtil <= 100]


def _old(gpu: Gpu, since_us: int) -> list[tuple[int, int, int]]:
    return _of_processes(gpu.api.nvmlDeviceGetProcessUtilization(gpu.handle, since_us))


def _new(gpu: Gpu, since_us: int) -> list[tuple[int, int, int]]:
    return _of_processes(gpu.api.nvmlDeviceGetProcessesUtilizationInfo(gpu.handle, since_us))


def _of_device(gpu: Gpu, since_us: int) -> list[tuple[int, int, int]]:
    kind = gpu.api.NVML_GPU_UTILIZATION_SAMPLES
    _, found = gpu.api.nvmlDeviceGetSamples(gpu.handle, kind, since_us)
    return [(int(s.timeStamp), DEVICE_ITSELF, int(s.sampleValue.uiVal)) for s in found if s.sampleValue.uiVal <= 100]


_READERS: Final[dict[str, Callable[[Gpu, int], Sequence[tuple[int, int, int]]]]] = {
    OLD: _old,
    NEW: _new,
    DEVICE: _of_device,
}


def _says_nothing_new(gpu: Gpu, refused: Refused) -> bool:
    """NOT_FOUND; and the binding raises success where there is room for nothing because there is nothing."""
    nothing = (gpu.api.NVML_ERROR_NOT_FOUND, gpu.api.NVML_SUCCESS)
    return refused.code in nothing
