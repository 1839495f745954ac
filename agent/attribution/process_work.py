# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process seems to have done on one device in a tick, by its own waits and by NVML's share of time.

A process of which NVML has said nothing yet is taken together with others that run the same program: short jobs come
and go, and what is learned from one goes for the next.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.function_times import FunctionTimes, Owner
from agent.model import ProcessId
from agent.occupancy import sm_fraction
from agent.program_times import ProgramTimes, shape_of
from agent.samples import Delivered
from agent.sharing import Demand
from agent.tally import Launched

UNIT_NS = 10_000.0  # so that the unknowns of functions without a duration are of the order of 1
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
    is_share_of_sms: bool  # False: `activity` is a share of time, as GPUs before Hopper tell it
    sm_count: int | None
    work: Mapping[ProcessId, Mapping[int, Launched]]
    busy_ns: Mapping[ProcessId, float]
    sm_limits: Mapping[ProcessId, float]  # share of the SMs that an MPS client may use
    side_by_side: Collection[ProcessId] = ()  # MPS clients; the others take turns
    on_many_devices: Collection[ProcessId] = ()
    programs: Mapping[ProcessId, str] = field(default_factory=dict)  # of those that work on this device alone
    deliveries: Sequence[Delivered] = ()


@dataclass(slots=True)
class Busy:
    """NVML's time of a process against what its deliveries say and against its launches, over the last ticks."""

    told: float = 0.0
    believed: float = 0.0
    launches: float = 0.0
    ticks: float = 0.0

    def observe(self, believed: float, launches: float, told: float | None) -> None:
        """A tick without a sample, which NVML leaves out now and then, says nothing."""
        if told is None or not launches:
            return
        self.told = self.told * _BUSY_MEMORY + told
        self.believed = self.believed * _BUSY_MEMORY + believed
        self.launches = self.launches * _BUSY_MEMORY + launches
        self.ticks = self.ticks * _BUSY_MEMORY + 1

    @property
    def is_known(self) -> bool:
        """One sample is of another second than the launches beside it; a few will do."""
        return self.ticks >= _ENOUGH_BUSY

    def scale(self) -> float:
        """From what the deliveries say to what NVML says."""
        return self.told / self.believed if self.is_known and self.believed > 0 else 1.0

    def per_launch_ns(self) -> float | None:
        """For a process that never waits."""
        return self.told / self.launches if self.is_known else None

    def time_ns(self, believed: float, launches: float) -> float:
        """In a tick of which NVML says nothing."""
        return believed * self.scale() if believed else launches * (self.per_launch_ns() or 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """A process's tick: ns by unit, each of which stands for as much if its factor is 1."""

    owner: Owner
    units: Mapping[Unit, float]
    time_ns: float = 0.0  # in which it had kernels running
    open_ns: float = 0.0  # in which it had work that it had not yet waited for
    kernels: int = 0
    graph_ratio: float = 0.0  # the part that graphs were: only their kernels' mean grid is known

    @property
    def seemed_ns(self) -> float:
        """SM time, of what has a duration."""
        return self.units.get((self.owner, 0), 0.0)

    def demand(self, interval_ns: float) -> Demand:
        """As others feel it."""
        fraction = self.seemed_ns / self.time_ns
        return Demand(self.time_ns / interval_ns, fraction, self.time_ns / max(1, self.kernels))


@dataclass(frozen=True, slots=True)
class Durations:
    """What is known of one device's functions."""

    times: FunctionTimes
    programs: ProgramTimes

    def of(self, tick: Tick, process: ProcessId, function: int) -> float | None:
        """By the process's waits. One that works on several devices waits for the slowest: that says little."""
        return None if process in tick.on_many_devices else self.times.per_launch_ns(process, function)

    def of_new(self, tick: Tick, process: ProcessId, function: int) -> float | None:
        """By the waits of all who ran the same program, if any did."""
        program, one = tick.programs.get(process), tick.work[process][function]
        known = None if program is None else self.programs.per_launch_ns(program, one)
        return self.of(tick, process, function) if known is None else known

    def open_ns(self, process: ProcessId, program: str | None) -> float | None:
        """Mean time per launch until the process waited for it."""
        known = None if program is None else self.programs.waited_ns(program)
        return self.times.waited_ns(process) if known is None else known


def work_of(tick: Tick, process: ProcessId, known: Durations, busy: Busy) -> Work:
    """Launches × durations × the share of SMs that such grids keep busy; of NVML's time, once that is known."""
    functions = tick.work[process]
    rate = tick.interval_ns / tick.counted_ns if tick.counted_ns else 1.0
    launches = rate * sum(one.launches for one in functions.values())
    durations = {function: known.of(tick, process, function) for function in functions}
    believed = rate * sum(one.launches * (durations[function] or 0.0) for function, one in functions.items())
    told = tick.busy_ns.get(process)
    busy.observe(believed, launches, told)
    if busy.is_known:
        owner: Owner = process
        time_ns = busy.time_ns(believed, launches) if told is None else told
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
    return Work(owner, {**seemed, **unknown}, time_ns, open_ns, kernels, graph_ns / time_ns if time_ns else 0.0)


def _by_waits(
    tick: Tick, process: ProcessId, owner: Owner, known: Durations, rate: float
) -> tuple[dict[int, float], dict[Unit, float]]:
    """Of a process of which NVML has not said enough yet: ns by function; and units of what has no duration."""
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


def _fraction(tick: Tick, process: ProcessId, one: Launched) -> float:
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
