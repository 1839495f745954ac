# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Splits a device's tick between processes. Pure: values in, values out.

Principle (a test of that name): Σ processes + unattributed − excess = device, as read, for SM time, memory and PCIe
bytes. SM time has no excess: it is the device's activity, split by each process's estimated SM time. No process has
more than its launches explain, with the error of their durations; the rest of the activity stays unattributed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeVar

from agent.core.clock import NS_PER_SECOND
from agent.core.model import DeviceReading, DeviceUuid, ProcessId, Provenance, Totals, Unattributed, Usage

N = TypeVar("N", int, float)
_MOST_PENDING: Final = 1.0  # ticks of the whole device
MEASURED_ERROR: Final = 0.015  # of the device: its figure is of samples that are not quite the tick's


@dataclass(frozen=True, slots=True)
class Work:
    """What one process did on one device in the tick."""

    process: ProcessId
    launches: int | None  # kernels; None: no probe sees this process
    sm_ns: float | None  # estimated SM time, ns of the whole device
    pcie_tx_bytes: int | None
    pcie_rx_bytes: int | None
    memory_bytes: int | None
    peer_tx_bytes: int = 0
    peer_rx_bytes: int = 0
    sm_error_ns: float | None = None  # by how much the estimate may be raised or lowered
    sm_bound_ns: float | None = None  # within which it is in nine of ten ticks; None: sm_error_ns
    memory_peak_bytes: int | None = None
    memory_by_kind: Mapping[str, int] = field(default_factory=dict)
    memory_by_age: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attribution:
    """One device's tick, split."""

    reading: DeviceReading
    usage: Mapping[ProcessId, Usage]
    unattributed: Unattributed
    pending: Mapping[ProcessId, float] = field(default_factory=dict)  # launched and not run yet: ratio of the tick


@dataclass(frozen=True, slots=True)
class Present:
    """Who is on a device.

    `sole`: the only process that NVML lists there, if it lists any: what the device did is what that did, so it is
    measured. `others`: one may have worked there of which nothing is known. `newcomers`: NVML does not list them there,
    so they get what the others leave of the device, and never more than it has.
    """

    sole: ProcessId | None = None
    others: bool = False
    newcomers: Collection[ProcessId] = ()


_ANYONE: Final = Present()


def attribute(
    reading: DeviceReading,
    work: Sequence[Work],
    interval_ns: int,
    present: Present = _ANYONE,
    pending: Mapping[ProcessId, float] = MappingProxyType({}),
) -> Attribution:
    """Splits a device among the processes that worked on it. `pending`: of the tick before."""
    seconds = interval_ns / NS_PER_SECOND
    estimates = {w.process: _ratio(w.sm_ns, interval_ns) for w in work}
    estimates = _cut_newcomers(estimates, reading.sm_activity_ratio, present.newcomers)
    errors = {w.process: _ratio(w.sm_error_ns, interval_ns) for w in work}
    sm, left = split_activity(reading.sm_activity_ratio, estimates, errors, pending)
    measured = interval_ns > 0 and reading.sm_activity_ratio is not None and [w.process for w in work] == [present.sole]
    if measured:
        sm = {work[0].process: reading.sm_activity_ratio}
    error = 0.0 if present.others else _device_error(reading, sm.values())
    work = _cut_copies(reading, work, seconds, present.newcomers)
    usage = {w.process: _usage(reading, w, sm[w.process], seconds) for w in work}
    for w in work:
        if measured:
            exact = replace(usage[w.process], sm_provenance=Provenance.MEASURED, sm_error_ratio=MEASURED_ERROR)
            usage[w.process] = exact
        elif sm[w.process] is not None:
            own = _ratio(w.sm_error_ns if w.sm_bound_ns is None else w.sm_bound_ns, interval_ns)
            known = None if own is None else min(1.0, math.hypot(own, error))
            usage[w.process] = replace(usage[w.process], sm_error_ratio=known)
    return Attribution(reading, usage, _remainder(reading, usage.values()), left)


def without_instances(whole: Attribution, instances: Iterable[Attribution]) -> Attribution:
    """A GPU that is split into MIG instances has their PCIe traffic: what is known of it is not unattributed."""
    rows = [*whole.usage.values(), *(usage for instance in instances for usage in instance.usage.values())]
    reading = whole.reading
    tx, tx_excess = _rest(reading.pcie_tx_bytes_per_second, (row.pcie_tx_bytes_per_second for row in rows))
    rx, rx_excess = _rest(reading.pcie_rx_bytes_per_second, (row.pcie_rx_bytes_per_second for row in rows))
    rest = replace(
        whole.unattributed,
        pcie_tx_bytes_per_second=tx,
        pcie_rx_bytes_per_second=rx,
        pcie_tx_excess_bytes_per_second=tx_excess,
        pcie_rx_excess_bytes_per_second=rx_excess,
    )
    return replace(whole, unattributed=rest)


def split_activity(
    activity: float | None,
    estimates: Mapping[ProcessId, float | None],
    errors: Mapping[ProcessId, float | None],
    pending: Mapping[ProcessId, float],
) -> tuple[dict[ProcessId, float | None], dict[ProcessId, float]]:
    """Each process's share of the activity, and what is left of its launches for the next tick.

    More activity than estimates: first what was launched before is taken to have run, then each process gets more,
    as far as its error goes; no further. Less: each gets less, in proportion to its error, and what it launched beyond
    that may run in the next tick. Without an error a process may have done any of it.
    """
    known = {process: estimate for process, estimate in estimates.items() if estimate is not None}
    total = sum(known.values())
    if activity is None and total > 1:
        activity = 1.0  # it was not measured, but nothing does more than all of a device
    if activity is None:
        return dict(estimates), {}
    before = {process: pending.get(process, 0.0) for process in known}
    bounds = {process: _bound(errors.get(process), estimate) for process, estimate in known.items()}
    if total <= activity:
        shares = _raised(_raised(known, before, activity), bounds, activity)
    else:
        least = {process: min(estimate, bounds[process]) for process, estimate in known.items()}
        shares = _lowered(known, least, activity)
    left = {process: estimate + before[process] - shares[process] for process, estimate in known.items()}
    return {**dict.fromkeys(estimates), **shares}, {p: min(_MOST_PENDING, ns / 2) for p, ns in left.items() if ns > 0}


def _bound(error: float | None, estimate: float) -> float:
    return 1.0 if error is None and estimate else error or 0.0


def _raised(shares: Mapping[ProcessId, float], by: Mapping[ProcessId, float], most: float) -> dict[ProcessId, float]:
    """Each by its figure, or by the same part of it, so that the sum is `most` at most."""
    room, wanted = most - sum(shares.values()), sum(by.values())
    part = min(1.0, max(0.0, room) / wanted) if wanted > 0 else 0.0
    return {process: share + part * by[process] for process, share in shares.items()}


def _lowered(shares: Mapping[ProcessId, float], by: Mapping[ProcessId, float], sum_: float) -> dict[ProcessId, float]:
    """Each by its figure, or by the same part of it, so that the sum is `sum_`; where that is too little, all alike."""
    over, wanted = sum(shares.values()) - sum_, sum(by.values())
    part = min(1.0, over / wanted) if wanted > 0 else 0.0
    lower = {process: share - part * by[process] for process, share in shares.items()}
    total = sum(lower.values())
    return {process: share * sum_ / total for process, share in lower.items()} if total > 0 else lower


def add_work(totals: Totals, usage: Usage, work: Work, seconds: float) -> Totals:
    """The running sums after one more tick."""
    return replace(
        totals,
        sm_seconds=totals.sm_seconds + (usage.sm_ratio or 0.0) * seconds,
        launches=totals.launches + (work.launches or 0),
        pcie_tx_bytes=totals.pcie_tx_bytes + (work.pcie_tx_bytes or 0),
        pcie_rx_bytes=totals.pcie_rx_bytes + (work.pcie_rx_bytes or 0),
        peer_tx_bytes=totals.peer_tx_bytes + work.peer_tx_bytes,
        peer_rx_bytes=totals.peer_rx_bytes + work.peer_rx_bytes,
    )


def add_rates(totals: Totals, sm_ratio: float | None, tx: float | None, rx: float | None, seconds: float) -> Totals:
    """Running sums after a tick of these rates; what is unknown adds nothing."""
    return replace(
        totals,
        sm_seconds=totals.sm_seconds + (sm_ratio or 0.0) * seconds,
        pcie_tx_bytes=totals.pcie_tx_bytes + round((tx or 0.0) * seconds),
        pcie_rx_bytes=totals.pcie_rx_bytes + round((rx or 0.0) * seconds),
    )


def sum_usage(parts: Iterable[Usage], totals: Mapping[DeviceUuid, Totals]) -> tuple[Usage, ...]:
    """A container's use per device: the sum of its processes'. What is unknown of all of them stays unknown."""
    by_device: dict[DeviceUuid, list[Usage]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    return tuple(
        Usage(
            device=device,
            sm_ratio=_sum(row.sm_ratio for row in rows),
            sm_provenance=_weakest(row.sm_provenance for row in rows),
            memory_bytes=_sum(row.memory_bytes for row in rows),
            pcie_tx_bytes_per_second=_sum(row.pcie_tx_bytes_per_second for row in rows),
            pcie_rx_bytes_per_second=_sum(row.pcie_rx_bytes_per_second for row in rows),
            launches_per_second=_sum(row.launches_per_second for row in rows),
            totals=totals.get(device, Totals()),
            sm_error_ratio=_error(rows),
            memory_peak_bytes=_sum(row.memory_peak_bytes for row in rows),
            memory_by_kind=_sum_by_name(row.memory_by_kind for row in rows),
            memory_by_age=_sum_by_name(row.memory_by_age for row in rows),
        )
        for device, rows in by_device.items()
    )


def _weakest(values: Iterable[Provenance | None]) -> Provenance | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Provenance.ESTIMATED if Provenance.ESTIMATED in known else Provenance.MEASURED


def _error(rows: Sequence[Usage]) -> float | None:
    """Errors of one device's processes are against each other, so a container's is at most their sum."""
    errors = [row.sm_error_ratio for row in rows if row.sm_ratio is not None]
    if not errors or None in errors:
        return None
    return min(1.0, sum(error or 0.0 for error in errors))


def _sum_by_name(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _device_error(reading: DeviceReading, parts: Iterable[float | None]) -> float:
    """The error of the sum of the estimates, all of which may be that of one of them."""
    if reading.sm_activity_ratio is None:
        return 0.0
    return abs(reading.sm_activity_ratio - sum(part or 0.0 for part in parts))


def _sum(values: Iterable[N | None]) -> N | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _ratio(sm_ns: float | None, interval_ns: int) -> float | None:
    return None if sm_ns is None or not interval_ns else sm_ns / interval_ns


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or not seconds else count / seconds


def _usage(reading: DeviceReading, work: Work, sm_ratio: float | None, seconds: float) -> Usage:
    return Usage(
        device=reading.device.uuid,
        sm_ratio=sm_ratio,
        sm_provenance=None if sm_ratio is None else Provenance.ESTIMATED,
        memory_bytes=work.memory_bytes,
        pcie_tx_bytes_per_second=_rate(work.pcie_tx_bytes, seconds),
        pcie_rx_bytes_per_second=_rate(work.pcie_rx_bytes, seconds),
        launches_per_second=_rate(work.launches, seconds),
        memory_peak_bytes=work.memory_peak_bytes,
        memory_by_kind=work.memory_by_kind,
        memory_by_age=work.memory_by_age,
    )


def _cut_newcomers(
    estimates: Mapping[ProcessId, float | None], activity: float | None, newcomers: Collection[ProcessId]
) -> dict[ProcessId, float | None]:
    """The estimates; those of newcomers within what the others leave of the device."""
    known = {process: estimate for process, estimate in estimates.items() if estimate is not None}
    factor = _left_ratio(1.0 if activity is None else activity, known, newcomers)
    return {p: e * factor if e is not None and p in newcomers else e for p, e in estimates.items()}


def _cut_copies(
    reading: DeviceReading, work: Sequence[Work], seconds: float, newcomers: Collection[ProcessId]
) -> Sequence[Work]:
    """The same work; newcomers have copied at most what the others leave of the device's traffic."""
    if not newcomers or not seconds:
        return work
    tx_rate, rx_rate = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
    tx_bytes = {w.process: w.pcie_tx_bytes or 0.0 for w in work}
    rx_bytes = {w.process: w.pcie_rx_bytes or 0.0 for w in work}
    tx = 1.0 if tx_rate is None else _left_ratio(tx_rate * seconds, tx_bytes, newcomers)
    rx = 1.0 if rx_rate is None else _left_ratio(rx_rate * seconds, rx_bytes, newcomers)
    return [
        replace(w, pcie_tx_bytes=_part(w.pcie_tx_bytes, tx), pcie_rx_bytes=_part(w.pcie_rx_bytes, rx))
        if w.process in newcomers
        else w
        for w in work
    ]


def _left_ratio(whole: float, claims: Mapping[ProcessId, float], newcomers: Collection[ProcessId]) -> float:
    """What the others leave of the whole, as a fraction of what newcomers claim; at most 1."""
    claimed = sum(claim for process, claim in claims.items() if process in newcomers)
    left = whole - sum(claim for process, claim in claims.items() if process not in newcomers)
    return min(1.0, max(0.0, left) / claimed) if claimed else 1.0


def _part(size: int | None, ratio: float) -> int | None:
    return None if size is None else int(size * ratio)


def _remainder(reading: DeviceReading, usage: Iterable[Usage]) -> Unattributed:
    rows = list(usage)
    memory, memory_excess = _rest(reading.memory_used_bytes, (row.memory_bytes for row in rows))
    tx, tx_excess = _rest(reading.pcie_tx_bytes_per_second, (row.pcie_tx_bytes_per_second for row in rows))
    rx, rx_excess = _rest(reading.pcie_rx_bytes_per_second, (row.pcie_rx_bytes_per_second for row in rows))
    return Unattributed(
        device=reading.device.uuid,
        sm_ratio=_rest(reading.sm_activity_ratio, (row.sm_ratio for row in rows))[0],
        memory_bytes=memory,
        pcie_tx_bytes_per_second=tx,
        pcie_rx_bytes_per_second=rx,
        memory_excess_bytes=memory_excess,
        pcie_tx_excess_bytes_per_second=tx_excess,
        pcie_rx_excess_bytes_per_second=rx_excess,
    )


def _rest(device: N | None, parts: Iterable[N | None]) -> tuple[N | None, N | None]:
    """What is left of a device's figure, and what the parts have beyond it. Both None where it was not read."""
    if device is None:
        return None, None
    rest = device - sum(part for part in parts if part is not None)
    return max(rest, type(rest)(0)), max(-rest, type(rest)(0))
