# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process seems to have done on one device in a tick, by its own waits and by NVML's share of time.

A process that NVML has not reported yet is taken together with others that run the same program: short jobs come and
go, and what is learned from one is used for the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.attribution.contention import SmDemand, sm_fraction
from agent.attribution.counters import FunctionLaunches
from agent.attribution.durations import FunctionTimes, Owner, ProgramTimes, shape_of
from agent.collectors.samples import Delivered
from agent.core.model import ProcessId

UNIT_NS = 10_000.0  # scales the unknown durations to the order of 1
_BUSY_MEMORY = 0.8
_ENOUGH_BUSY = 2.0  # ticks
Unit = tuple[Owner, int]  # an owner's factor (function 0), or the duration of one of its functions


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of one device. Times in ns; `busy_ns`: NVML's, in which it had work on the device.

    `counted_ns`: how long launches were counted for; activity and shares of time are of `interval_ns`.
    """

    interval_ns: int
    counted_ns: int
    activity_ns: float | None  # SM time of the whole device
    is_share_of_sms: bool  # False: `activity` is a share of time, as on GPUs before Hopper
    sm_count: int | None
    work: Mapping[ProcessId, Mapping[int, FunctionLaunches]]
    busy_ns: Mapping[ProcessId, float]
    sm_limits: Mapping[ProcessId, float]  # share of the SMs that an MPS client may use
    side_by_side: Collection[ProcessId] = ()  # MPS clients; the others take turns
    on_many_devices: Collection[ProcessId] = ()
    programs: Mapping[ProcessId, str] = field(default_factory=dict)  # of those that work on this device alone
    deliveries: Sequence[Delivered] = ()


@dataclass(slots=True)
class NvmlTime:
    """NVML's time of a process beside its time by deliveries and its launches, over the last ticks."""

    nvml_ns: float = 0.0
    predicted_ns: float = 0.0
    launches: float = 0.0
    ticks: float = 0.0

    def observe(self, predicted_ns: float, launches: float, nvml_ns: float | None) -> None:
        """Adds a tick, unless NVML has no sample of it, which happens now and then."""
        if nvml_ns is None or not launches:
            return
        self.nvml_ns = self.nvml_ns * _BUSY_MEMORY + nvml_ns
        self.predicted_ns = self.predicted_ns * _BUSY_MEMORY + predicted_ns
        self.launches = self.launches * _BUSY_MEMORY + launches
        self.ticks = self.ticks * _BUSY_MEMORY + 1

    @property
    def is_known(self) -> bool:
        """Whether there are enough samples: a single one is of another second than the launches beside it."""
        return self.ticks >= _ENOUGH_BUSY

    def scale(self) -> float:
        """NVML's time ÷ the time by deliveries; 1 while it is not known."""
        return self.nvml_ns / self.predicted_ns if self.is_known and self.predicted_ns > 0 else 1.0

    def per_launch_ns(self) -> float | None:
        """For a process that never waits."""
        return self.nvml_ns / self.launches if self.is_known else None

    def time_ns(self, predicted_ns: float, launches: float) -> float:
        """The estimate for a tick without a sample."""
        return predicted_ns * self.scale() if predicted_ns else launches * (self.per_launch_ns() or 0.0)


@dataclass(frozen=True, slots=True)
class ProcessWork:
    """A process's tick: SM time by unit, ns, if the unit's factor is 1."""

    owner: Owner
    units: Mapping[Unit, float]
    time_ns: float = 0.0  # in which it had kernels running
    open_ns: float = 0.0  # in which it had work that it had not yet waited for
    kernels: int = 0
    graph_ratio: float = 0.0  # the part of graphs: only their kernels' mean grid is known

    @property
    def seemed_ns(self) -> float:
        """SM time of the functions that have a duration, before correction."""
        return self.units.get((self.owner, 0), 0.0)

    def demand(self, interval_ns: float) -> SmDemand:
        """Its demand, as it competes with others."""
        fraction = self.seemed_ns / self.time_ns
        return SmDemand(self.time_ns / interval_ns, fraction, self.time_ns / max(1, self.kernels))


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of functions on one device, by process and by program."""

    times: FunctionTimes
    programs: ProgramTimes

    def of(self, tick: Tick, process: ProcessId, function: int) -> float | None:
        """By the process's waits. None for a process on several devices: it waits for the slowest one."""
        return None if process in tick.on_many_devices else self.times.per_launch_ns(process, function)

    def of_new(self, tick: Tick, process: ProcessId, function: int) -> float | None:
        """By the waits of all processes of the same program; else by the process's own."""
        program, one = tick.programs.get(process), tick.work[process][function]
        known = None if program is None else self.programs.per_launch_ns(program, one)
        return self.of(tick, process, function) if known is None else known

    def open_ns(self, process: ProcessId, program: str | None) -> float | None:
        """Mean time per launch from the launch until the process has waited for it."""
        known = None if program is None else self.programs.waited_ns(program)
        return self.times.waited_ns(process) if known is None else known


def work_of(tick: Tick, process: ProcessId, known: Durations, nvml: NvmlTime) -> ProcessWork:
    """Launches × durations × share of SMs that the grids keep busy; scaled to NVML's time, once that is known."""
    functions = tick.work[process]
    rate = tick.interval_ns / tick.counted_ns if tick.counted_ns else 1.0
    launches = rate * sum(one.launches for one in functions.values())
    durations = {function: known.of(tick, process, function) for function in functions}
    predicted_ns = rate * sum(one.launches * (durations[function] or 0.0) for function, one in functions.items())
    nvml_ns = tick.busy_ns.get(process)
    nvml.observe(predicted_ns, launches, nvml_ns)
    if nvml.is_known:
        owner: Owner = process
        time_ns = nvml.time_ns(predicted_ns, launches) if nvml_ns is None else nvml_ns
        lengths = {function: known.times.per_launch_ns(process, function) for function in functions}
        weights = {function: one.launches * (lengths[function] or 1.0) for function, one in functions.items()}
        total = sum(weights.values())
        spent = {function: time_ns * weight / total if total else 0.0 for function, weight in weights.items()}
        unknown: dict[Unit, float] = {}
    else:
        owner = tick.programs.get(process, process)
        spent, unknown = _by_waits(tick, process, owner, known, rate)
    fractions = {function: _fraction(tick, process, one) for function, one in functions.items()}
    seemed = {(owner, 0): sum(ns * fractions[function] for function, ns in spent.items())} if spent else {}
    time_ns = sum(spent.values())
    graph_ns = sum(ns for function, ns in spent.items() if functions[function].kernels > functions[function].launches)
    kernels = sum(one.kernels for one in functions.values())
    waited = known.open_ns(process, tick.programs.get(process))
    open_ns = tick.interval_ns if waited is None else min(launches * waited, tick.interval_ns)
    return ProcessWork(owner, {**seemed, **unknown}, time_ns, open_ns, kernels, graph_ns / time_ns if time_ns else 0.0)


def _by_waits(
    tick: Tick, process: ProcessId, owner: Owner, known: Durations, rate: float
) -> tuple[dict[int, float], dict[Unit, float]]:
    """For a process with too few NVML samples: ns by function; and units of functions without a duration."""
    spent: dict[int, float] = {}
    unknown: dict[Unit, float] = {}
    for function, one in tick.work[process].items():
        duration = known.of_new(tick, process, function)
        if duration is None:
            unit = (owner, function if owner == process else shape_of(one))
            times = rate * one.launches * _fraction(tick, process, one)
            unknown[unit] = unknown.get(unit, 0.0) + times * UNIT_NS
        else:
            spent[function] = rate * one.launches * duration
    return spent, unknown


def _fraction(tick: Tick, process: ProcessId, one: FunctionLaunches) -> float:
    """Share of the device's SMs that a launch keeps busy while it runs."""
    if not tick.is_share_of_sms:
        return 1.0
    limit = tick.sm_limits.get(process, 1.0)
    if not one.blocks or not tick.sm_count:
        return limit
    if one.waves and limit >= 1:
        return min(1.0, one.wave_sms / (one.waves * tick.sm_count))
    usable = max(1, round(tick.sm_count * limit))
    blocks = one.blocks / max(1, one.kernels)
    return sm_fraction(blocks, one.threads_per_block, usable) * usable / tick.sm_count
