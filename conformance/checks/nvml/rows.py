# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The item's rows out of what was recorded: utilisation, PCIe counters, process lists, the cost of the calls. Pure.

Utilisation is NVML's samples and GPM, against what a load is known to have done. The lists are without and with MPS,
where it also matters which process is credited with a client's share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from conformance.checks.nvml import gpm
from conformance.checks.nvml.binding import Refused
from conformance.checks.nvml.cost import Cost
from conformance.checks.nvml.lists import bytes_of, lists_of
from conformance.checks.nvml.pcie import LOOK_SECONDS, TO_DEVICE, CopyRates, FieldReadings
from conformance.checks.nvml.samples import DEVICE, DEVICE_ITSELF, NEW, OLD, Samples, largest_difference
from conformance.checks.nvml.watching import Observation
from conformance.report.model import Row, holds, measured, near, skipped

NVML: Final = "nvml"
SHORT: Final = {OLD: "old call", NEW: "new call"}
_SMUTIL_WITHIN: Final = 0.05
SM_WITHIN: Final = 0.03
_SAMPLE_US: Final = 1_000_000  # a sample is of the time before it: 0.2 s with 580.159.04, a second before
_CALLS_AGREE: Final = 0.02
_PERIOD, _LEAST_PERIOD, _MOST_PERIOD = 0.2, 0.1, 0.4  # s: as 580.159.04
_BOTH: Final = "compute + MPS compute"
_LEAST_RATIO: Final = 0.95
_MOST_HEADERS: Final = 1.35  # of PCIe packets, for each byte that they carry
_THROUGHPUT_MS: Final = 20.0  # as the field notes have it
_MIB: Final = 1 << 20
SIMULATED_CONTEXT_BYTES: Final = 520 * _MIB


def of_a_duty(seen: Observation, percent: int) -> Iterator[Row]:
    """smUtil, the device's own utilisation and GPM against the share of time of one load on all SMs."""
    ((name, busy),) = seen.busy.items()
    pid = seen.pids[name]
    for call, short in SHORT.items():
        yield _smutil(f"smUtil of a load of {percent} %, {short}", seen, call, pid, busy)
    yield _smutil(f"device utilisation with a load of {percent} %, {DEVICE}", seen, DEVICE, DEVICE_ITSELF, busy)
    truth = busy if seen.sm_truth is None else seen.sm_truth
    yield gpm_near(f"GPM SM_UTIL with a load of {percent} %", seen.gpm, gpm.SM_UTIL, truth)
    yield gpm_near(f"GPM GRAPHICS_UTIL with a load of {percent} %", seen.gpm, gpm.GRAPHICS_UTIL, busy)


def of_half_the_sms(seen: Observation) -> Iterator[Row]:
    """Rows of a load on half of the SMs, which distinguishes SMs from time."""
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


def of_the_calls(seen: Observation) -> Iterator[Row]:
    """The two calls for themselves: support, pids, how often, how old."""
    (pid,) = seen.pids.values()
    for call, short in SHORT.items():
        found = seen.samples[call]
        yield holds(NVML, f"{short}: answers", found.supported, found.supported, True, found.refused or call)
        if not found.supported:
            continue
        others = ", ".join(map(str, sorted(found.pids() - {pid}))) or "none"
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


def _smutil(what: str, seen: Observation, call: str, pid: int, busy: float) -> Row:
    """Of the samples that speak of nothing but the time in which the load was at work."""
    found = seen.samples[call]
    ratio = found.mean_ratio(pid, seen.ready_us + _SAMPLE_US)
    if ratio is None and found.refused:
        return skipped(NVML, what, found.refused)
    return near(NVML, what, ratio, busy, _SMUTIL_WITHIN, note=f"{len(found.found)} samples in {found.looks} looks")


def _times(short: str, found: Samples, *, assumed: bool) -> Iterator[Row]:
    """How often samples come, and how old they are. `assumed`: that they come five times a second."""
    period, what = found.period_seconds(), f"{short}: samples come every"
    if period is None:
        yield skipped(NVML, what, found.refused or f"{len(found.found)} in {found.looks} looks")
    elif not assumed:
        yield measured(NVML, what, period, "s", note="the median")
    else:
        fits = _LEAST_PERIOD <= period <= _MOST_PERIOD
        yield holds(NVML, what, fits, round(period, 3), _PERIOD, "the median", "s")
    ages = found.ages_ms()
    span = f"{ages[0]:.0f} to {ages[-1]:.0f} ms; half of the 50 ms between looks is in it" if ages else found.refused
    yield measured(
        NVML, f"{short}: age of a sample when it is first seen", median(ages) if ages else None, "ms", note=span
    )


def of_copies(copied: CopyRates) -> Iterator[Row]:
    """Every source of PCIe bytes against what was copied."""
    field, metric = (198, 21) if copied.direction == TO_DEVICE else (197, 20)
    where = f"PCIe {copied.direction}"
    note = f"{copied.true / 1e9:.2f} GB/s were copied; packets have headers, so a little over 1 is as it should be"
    sources = (
        (f"{where}: field {field} ÷ copied", _rate(copied.field)),
        (f"{where}: GPM {metric} ÷ copied", copied.gpm),
        (f"{where}: nvmlDeviceGetPcieThroughput ÷ copied", copied.throughput),
    )
    for what, rate in sources:
        yield skipped(NVML, what, rate.why) if isinstance(rate, Refused) else _ratio(what, rate / copied.true, note)
    other = _rate(copied.other_way)
    if not isinstance(other, Refused):
        yield measured(NVML, f"{where}: the other direction's field ÷ copied", other / copied.true, "ratio")
    yield _cumulative(f"{where}: field {field} is cumulative", copied.field)


def _rate(field: FieldReadings | Refused) -> float | Refused:
    """Bytes per second."""
    if isinstance(field, Refused):
        return field
    grown = field.grown()
    return Refused("it went back, and not by a wrap") if grown is None else grown / field.seconds


def _cumulative(what: str, field: FieldReadings | Refused) -> Row:
    """A rate, or bytes since the last look, would go up and down. The agent takes one of 64 bits for one that lasts."""
    if isinstance(field, Refused):
        return skipped(NVML, what, field.why)
    grows, wraps = bool(field.grown()), field.wraps()
    looks = (
        f"{len(field.values)} looks, one each {LOOK_SECONDS * 1e3:.0f} ms, from {field.values[0]} to {field.values[-1]}"
    )
    note = f"wrapped {wraps} times, and NVML gives it {field.bits} bits" if grows and wraps else ""
    lasts = not wraps or field.bits == 32
    return holds(NVML, what, grows and lasts, grows, True, "; ".join(filter(None, (looks, note))))


def of_cost(cost: Cost, truth: float | None) -> Iterator[Row]:
    """The agent's tick, call by call; and its activity of the device where the truth is known."""
    yield measured(NVML, "agent: cost of a tick", cost.tick_ms, "ms", note="all that its NVML collector asks")
    for name, ms in cost.calls_ms.items():
        yield measured(NVML, f"agent: cost of {name}", ms, "ms", note=f"{cost.per_tick[name]:g} in a tick")
    note = ", ".join(f"{name} ({times})" for name, times in sorted(cost.errors.items())) or "none"
    yield holds(NVML, "agent: calls that NVML refuses", not cost.errors, len(cost.errors), 0, note)
    ratios = [one.sm_activity_ratio for one in cost.readings if one.sm_activity_ratio is not None]
    sources = ", ".join(sorted({one.sm_activity_source or "nothing" for one in cost.readings}))
    if truth is not None:
        mean = sum(ratios) / len(ratios) if ratios else None
        yield near(NVML, "agent: SM activity of the device", mean, truth, SM_WITHIN, note=f"from {sources}")


def _ratio(what: str, ratio: float, note: str) -> Row:
    fits = _LEAST_RATIO <= ratio <= _MOST_HEADERS
    return holds(NVML, what, fits, round(ratio, 4), 1.0, note)


def of_sources(costs: Mapping[str, float | Refused]) -> Iterator[Row]:
    """Rows of what one reading of each source of PCIe bytes takes."""
    for name, ms in costs.items():
        what = f"cost of {name}"
        if isinstance(ms, Refused):
            yield skipped(NVML, what, ms.why)
        else:
            yield measured(NVML, what, ms, "ms", _THROUGHPUT_MS if "Throughput" in name else None)


def of_the_lists(seen: Observation, allocated_bytes: int) -> Iterator[Row]:
    """Which list has a process without MPS, and with how many bytes."""
    (pid,) = seen.pids.values()
    where = lists_of(seen.listed, pid)
    yield holds(NVML, "lists: a process without MPS is in", where == "compute", where, "compute", _strangers(seen))
    used = bytes_of(seen.listed, pid)
    beyond = None if used is None else used - allocated_bytes
    yield measured(
        NVML,
        "lists: bytes of a process beyond what it allocated",
        beyond,
        "bytes",
        SIMULATED_CONTEXT_BYTES,
        "the context and the module; the baseline is the simulated GPU's",
    )
    what = "lists: growth of the device's used bytes beyond those of the process"
    if used is None or seen.used_bytes is None or seen.used_before_bytes is None:
        yield skipped(NVML, what, "NVML does not say")
    else:
        note = "in the agent's figures these bytes are unattributed"
        yield measured(NVML, what, seen.used_bytes - seen.used_before_bytes - used, "bytes", 0, note)


def of_mps(seen: Observation, allocated_bytes: int) -> Iterator[Row]:
    """Two clients, each on half of the SMs."""
    where = {lists_of(seen.listed, pid) for pid in seen.pids.values()}
    note = " / ".join(sorted(where))
    yield holds(NVML, "MPS: clients are in the list", where == {_BOTH}, note, _BOTH)
    known = seen.mps_clients & set(seen.pids.values())
    yield holds(
        NVML, "MPS: clients that the agent takes for such", len(known) == len(seen.pids), len(known), len(seen.pids)
    )
    listed = " / ".join(sorted({lists_of(seen.listed, pid) for pid in seen.mps_servers})) or "none"
    yield measured(NVML, "MPS: the server is in the list", listed, note=_strangers(seen))
    credited = _credited(seen)
    yield holds(
        NVML,
        "MPS: smUtil goes to",
        credited != "none",
        credited,
        "server",
        "the agent handles both: a server's share is unattributed, and its clients' then comes from the probes",
    )
    for name, pid in seen.pids.items():
        call = NEW if seen.samples[NEW].found else OLD
        ratio = seen.samples[call].mean_ratio(pid, seen.ready_us)
        note = seen.samples[call].refused or "on half of the SMs; baseline: its share of the time by its own count"
        yield measured(NVML, f"MPS: smUtil of the client {name}", ratio, "ratio", round(seen.busy[name], 4), note)
    used = [bytes_of(seen.listed, pid) for pid in seen.pids.values()]
    beyond = [one - allocated_bytes for one in used if one is not None]
    yield measured(
        NVML,
        "MPS: bytes of a client beyond what it allocated",
        max(beyond, default=None),
        "bytes",
        SIMULATED_CONTEXT_BYTES,
        "the larger one; the baseline is the simulated GPU's",
    )
    truth = sum(seen.busy.values()) / 2 if seen.sm_truth is None else seen.sm_truth
    yield gpm_near("MPS: GPM SM_UTIL, two clients on half of the SMs each", seen.gpm, gpm.SM_UTIL, truth)


def _credited(seen: Observation) -> str:
    pids = seen.samples[NEW].pids() | seen.samples[OLD].pids()
    credited = [
        name
        for name, those in (
            ("clients", pids & set(seen.pids.values())),
            ("server", pids & seen.mps_servers),
        )
        if those
    ]
    return " and ".join(credited) or "none"


def _strangers(seen: Observation) -> str:
    others = [entry for entry in seen.listed if entry.pid not in seen.pids.values()]
    return f"others on the device: {', '.join(f'{e.pid} ({e.list})' for e in others) or 'none'}"
