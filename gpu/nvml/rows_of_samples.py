# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows out of utilisation: NVML's samples and GPM against what a load is known to have done. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from gpu.nvml import gpm
from gpu.nvml.binding import Refused
from gpu.nvml.samples import DEVICE, DEVICE_ITSELF, NEW, OLD, Samples, largest_difference
from gpu.nvml.watching import Seen
from gpu.parts import holds, measured, near
from gpu.row import Row, skipped

NVML: Final = "nvml"
SHORT: Final = {OLD: "old call", NEW: "new call"}
_SMUTIL_WITHIN: Final = 0.05
SM_WITHIN: Final = 0.03
_SAMPLE_US: Final = 1_000_000  # a sample is of about the second before it
_CALLS_AGREE: Final = 0.02
_LEAST_PERIOD, _MOST_PERIOD = 0.5, 2.0  # s: "about once a second" in the field notes


def of_a_duty(seen: Seen, percent: int) -> Iterator[Row]:
    """smUtil, the device's own utilisation and GPM against the share of time of one load on all SMs."""
    ((name, busy),) = seen.busy.items()
    pid = seen.pids[name]
    for call, short in SHORT.items():
        yield _smutil(f"smUtil of a load of {percent} %, {short}", seen, call, pid, busy)
    yield _smutil(f"device utilisation with a load of {percent} %, {DEVICE}", seen, DEVICE, DEVICE_ITSELF, busy)
    truth = busy if seen.sm_truth is None else seen.sm_truth
    yield gpm_near(f"GPM SM_UTIL with a load of {percent} %", seen.gpm, gpm.SM_UTIL, truth)
    yield gpm_near(f"GPM GRAPHICS_UTIL with a load of {percent} %", seen.gpm, gpm.GRAPHICS_UTIL, busy)


def of_half_the_sms(seen: Seen) -> Iterator[Row]:
    """What tells SMs from time."""
    ((name, busy),) = seen.busy.items()
    call = NEW if seen.samples[NEW].found else OLD
    yield _smutil("smUtil, kernels on half of the SMs", seen, call, seen.pids[name], busy)
    truth = busy / 2 if seen.sm_truth is None else seen.sm_truth
    yield gpm_near("GPM SM_UTIL, kernels on half of the SMs", seen.gpm, gpm.SM_UTIL, truth)
    yield gpm_near("GPM GRAPHICS_UTIL, kernels on half of the SMs", seen.gpm, gpm.GRAPHICS_UTIL, busy)
    occupancy = None if isinstance(seen.gpm, Refused) else seen.gpm.get(gpm.SM_OCCUPANCY)
    yield measured(
        NVML,
        "GPM SM_OCCUPANCY, kernels on half of the SMs",
        None if occupancy is None else occupancy / 100,
        "ratio",
        round(busy / 4, 4),
        "blocks of 1,024 threads, of which an SM takes two; the simulated GPU calls an SM with a block on it full",
    )


def of_the_calls(seen: Seen) -> Iterator[Row]:
    """The two calls for themselves: support, pids, how often, how old."""
    (pid,) = seen.pids.values()
    for call, short in SHORT.items():
        found = seen.samples[call]
        yield holds(NVML, f"{short}: answers", found.supported, found.supported, True, found.refused or call)
        if not found.supported:
            continue
        others = ", ".join(map(str, sorted(found.pids() - {pid}))) or "nobody"
        yield holds(
            NVML, f"{short}: names the process", pid in found.pids(), pid in found.pids(), True, f"beside it: {others}"
        )
        yield from _times(short, found, assumed=True)
    yield from _times("device utilisation samples", seen.samples[DEVICE], assumed=False)
    difference = largest_difference(seen.samples[OLD], seen.samples[NEW])
    what = "old and new call: largest difference between their means"
    if difference is None:
        yield skipped(NVML, what, "they have no process in common")
    else:
        yield near(NVML, what, difference, 0.0, _CALLS_AGREE)


def gpm_near(what: str, averages: Mapping[int, float] | Refused, metric: int, truth: float) -> Row:
    """An average of GPM's, in per cent, against a ratio."""
    if isinstance(averages, Refused):
        return skipped(NVML, what, averages.why)
    percent = averages.get(metric)
    return near(NVML, what, None if percent is None else percent / 100, truth, SM_WITHIN)


def _smutil(what: str, seen: Seen, call: str, pid: int, busy: float) -> Row:
    """Of the samples that speak of nothing but the time in which the load was at work."""
    found = seen.samples[call]
    ratio = found.mean_ratio(pid, seen.ready_us + _SAMPLE_US)
    if ratio is None and found.refused:
        return skipped(NVML, what, found.refused)
    return near(NVML, what, ratio, busy, _SMUTIL_WITHIN, note=f"{len(found.found)} samples in {found.looks} looks")


def _times(short: str, found: Samples, *, assumed: bool) -> Iterator[Row]:
    """How often samples come, and how old they are. `assumed`: that they come about once a second."""
    period, what = found.period_seconds(), f"{short}: samples come every"
    if period is None:
        yield skipped(NVML, what, found.refused or f"{len(found.found)} in {found.looks} looks")
    elif not assumed:
        yield measured(NVML, what, period, "s", note="the median")
    else:
        fits = _LEAST_PERIOD <= period <= _MOST_PERIOD
        yield holds(NVML, what, fits, round(period, 3), 1.0, "the median", "s")
    ages = found.ages_ms()
    span = f"{ages[0]:.0f} to {ages[-1]:.0f} ms; half of the 50 ms between looks is in it" if ages else found.refused
    yield measured(
        NVML, f"{short}: age of a sample when it is first seen", median(ages) if ages else None, "ms", note=span
    )
