# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much SM time each process had of one device in a tick: an estimate with its error.

First comes what each process seems to have done (agent/attribution/process_work.py). MPS clients got a part of that
(agent/attribution/contention.py). What the device measured over the last ticks then corrects each process by a factor:
non-negative least squares, in which each factor has a prior as narrow as its process's own figures are certain. A
process that never waits, and that NVML does not report, has functions of unknown duration, for which there is only the
device's activity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.attribution.contention import SmDemand, fit_to_activity, shares_in_turns
from agent.attribution.durations import FunctionTimes, Owner, ProgramTimes
from agent.attribution.nnls import Evidence, Unknown
from agent.attribution.process_work import (
    NINETY_PERCENT,
    UNIT_NS,
    Durations,
    Figure,
    NvmlTime,
    PolledTime,
    ProcessWork,
    TickWork,
    Turns,
    Unit,
    Unseen,
    work_of,
)
from agent.core.model import ProcessId

_TICKS = 40
_FORGETTING = 0.92  # weight of a tick against the next one: durations drift
_LEAST_ERROR, _FIRST_ERROR = 0.05, 0.05  # of a tick: what was launched in one may run in the next
_PROGRAM_SIGMA = 0.35  # of the deliveries of a program's processes
_LEAST_SIGMA, _MOST_SIGMA = 0.25, 0.7  # of the deliveries of one process
_TURN_SIGMA, _TURN_SIGMA_PER_OTHER = 0.05, 0.3  # of those of one that takes turns: longer where they were interrupted
_HOST_CUT, _HOST_SIGMA = 0.5, 0.3  # of those in which it did not wait: the device may have idled
_CROWD_SIGMA = 0.15
_GRAPH_SIGMA = 0.1
_GRID_SIGMA = 0.1  # of the SMs that a grid keeps busy: blocks end at different times, and copies count as time
_ENOUGH_ROWS = 5
_NEGLIGIBLE = 1e-6  # of a device
_NO_DEMAND = SmDemand(0.0, 1.0, 0.0)
# So much larger than the evidence says are the errors of processes that take turns: their waits are longer whenever the
# others work, all ticks alike. By bench/attribution with the seeds 101 and 102, so that nine of ten ticks are within.
_ALIKE_IN_TURNS = 2.0
_UNSEEN: Unit = ("", 0)  # work that no probe sees, where there may be some
_UNSEEN_SIGMA = 0.5  # of the device


class Estimate(NamedTuple):
    """SM time in ns of the whole device; None where it is unknown. `error_ns`: by how much it may be raised or lowered
    to what the device did. `bound_ns`: within which it is in nine of ten ticks; None: as `error_ns`."""

    sm_ns: float | None
    error_ns: float | None
    bound_ns: float | None = None


@dataclass(slots=True)
class _Known:
    """What is known of one owner. `demand` and `open`, share of the time in which it has work at all: of late."""

    nvml: NvmlTime = field(default_factory=NvmlTime)
    by_nvml: bool = False  # the durations of its work in the ticks that are kept are NVML's
    demand: SmDemand = _NO_DEMAND
    open: float = 0.0
    ticks: int = 0
    part: float = 1.0  # of its demand that it gets
    sigma: float = _MOST_SIGMA  # the error of its own figures

    @property
    def is_active(self) -> bool:
        """Whether it did anything of late."""
        return self.demand.time > _NEGLIGIBLE

    def add(self, demand: SmDemand | None, opened: float) -> None:
        """One more tick; while they are few, all count alike."""
        self.ticks += 1
        memory = min(_FORGETTING, 1 - 1 / self.ticks)
        self.demand = self.demand.averaged(demand, memory)
        self.open = _mix(self.open, opened, memory)
        if not self.is_active:
            self.demand, self.open, self.ticks, self.part = _NO_DEMAND, 0.0, 0, 1.0


Works = Mapping[ProcessId, ProcessWork]


@dataclass(slots=True)
class SmTime:
    """The estimator of one device."""

    times: FunctionTimes
    _programs: ProgramTimes = field(default_factory=ProgramTimes)
    _owners: dict[Owner, _Known] = field(default_factory=dict)
    _evidence: Evidence[Unit] = field(default_factory=lambda: Evidence(_FORGETTING, _TICKS))  # shares of the device
    _solved: Mapping[Unit, Unknown] = field(default_factory=dict)
    _error: float = _FIRST_ERROR
    _activity: float | None = None
    _polled: PolledTime = field(default_factory=PolledTime)
    _unseen: Figure | None = None  # what NVML says of work that no probe sees, of the device

    def observe(self, tick: TickWork, unseen: Unseen | None = None) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and estimates it. `unseen`: others may have worked that are not in it; None: not so."""
        self._programs.observe(tick.deliveries, tick.programs, tick.work)
        turns = Turns.of(tick)
        works = {
            process: work_of(tick, process, self._durations(tick, process), self._of(process).nvml, turns)
            for process, functions in tick.work.items()
            if functions
        }
        self._drop({work.owner for work in works.values() if work.by_nvml != self._of(work.owner).by_nvml})
        for work in works.values():
            self._of(work.owner).by_nvml = work.by_nvml
        if unseen is None:
            self._polled = PolledTime()
        else:
            self._polled.observe(unseen, tick.interval_ns)
        self._unseen = self._polled.share(of_sms=tick.is_share_of_sms)
        if tick.activity_ns is not None and tick.interval_ns:
            units = {unit: ns / tick.interval_ns for unit, ns in _sum(works.values()).items()}
            if unseen is not None:
                units[_UNSEEN] = 1.0
            self._evidence.add(units, tick.activity_ns / tick.interval_ns, self._factor)
            self._update_demands(tick, works)
            self._update_parts(tick, works)
        self._update_uncertainty(works, tick.side_by_side)
        self._solve()
        self._owners = {o: one for o, one in self._owners.items() if isinstance(o, ProcessId) or one.is_active}
        estimates = {process: self._estimate(work, tick, process) for process, work in works.items()}
        return estimates | self._estimates_of_unseen(tick.interval_ns)

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, on the SMs that the function keeps busy; None while it is unknown."""
        duration = self.times.per_launch_ns(process, function)
        if duration is None and (known := self._owners.get(process)):
            duration = known.nvml.per_launch_ns()
        if duration is None:
            solved = self._solved.get((process, function))
            return None if solved is None else solved.value * UNIT_NS
        return duration * self._factor((process, 0))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone."""
        self._drop(processes)
        self._solved = {unit: one for unit, one in self._solved.items() if unit[0] not in processes}
        for process in processes:
            self._owners.pop(process, None)

    def _drop(self, gone: Collection[Owner]) -> None:
        """Takes what they are estimated to have done as final."""
        if gone:
            self._evidence.drop({unit for unit in self._evidence.keys if unit[0] in gone}, self._factor)

    def _durations(self, tick: TickWork, process: ProcessId) -> Durations:
        return Durations(self.times.of(process), self._programs.of(tick.programs.get(process)))

    def _of(self, owner: Owner) -> _Known:
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = _Known()
        return known

    def _scale(self, owner: Owner, known: _Known) -> Figure:
        """The time of an owner's work, were it alone, ÷ that by its waits: exactly by NVML, or as far as waits tell."""
        nvml = known.nvml
        if nvml.is_known and not nvml.by_waits:
            return Figure(1.0, known.sigma)
        if nvml.is_exact:
            return Figure(nvml.value, nvml.sigma)
        times = self.times.of(owner)
        idle = 1 - times.waited_ratio if times else 0.0
        return Figure(1 - _HOST_CUT * idle, known.sigma + _HOST_SIGMA * idle)

    def _update_demands(self, tick: TickWork, works: Works) -> None:
        now: dict[Owner, SmDemand] = {}
        opens: dict[Owner, float] = {}
        for work in works.values():
            owner = work.owner
            if work.time_ns > 0:
                demand = work.demand(tick.interval_ns, self._scale(owner, self._of(owner)).value)
                now[owner] = demand.combined(now[owner]) if owner in now else demand
            opens[owner] = opens.get(owner, 0.0) + work.open_ns / tick.interval_ns
        for owner, known in self._owners.items():
            if known.ticks or owner in now:
                known.add(now.get(owner), opens.get(owner, 0.0))

    def _update_parts(self, tick: TickWork, works: Works) -> None:
        """Updates the part of its demand that each owner gets: neighbours make each other seem to do more."""
        unknown = sum(v * self._factor(u) for work in works.values() for u, v in work.units.items() if u[1])
        activity = max(0.0, (tick.activity_ns or 0.0) - unknown) / tick.interval_ns
        self._activity = activity if self._activity is None else _mix(self._activity, activity)
        active = {owner: one for owner, one in self._owners.items() if one.is_active}
        clients = {work.owner for process, work in works.items() if process in tick.side_by_side}
        certain = {owner for owner, one in active.items() if one.nvml.is_exact}
        turns = shares_in_turns({owner: min(1.0, one.open) for owner, one in active.items()})
        for owner, one in active.items():
            cut = owner not in certain and owner not in clients
            one.part = min(1.0, turns[owner] / one.demand.time) if cut else 1.0
        if clients:  # what takes turns is fitted to the activity as a whole: _solve
            demands = {owner: one.demand.scaled_time(one.part) for owner, one in active.items()}
            for owner, part in fit_to_activity(demands, clients, certain, self._activity).items():
                active[owner].part *= part

    def _update_uncertainty(self, works: Works, side_by_side: Collection[ProcessId]) -> None:
        """Updates the standard deviation of each owner's own figures."""
        had_by_all = sum(one.demand.time * one.part for one in self._owners.values())
        for process, work in works.items():
            known = self._of(work.owner)
            fraction = work.seemed_ns / work.time_ns if work.time_ns else 1.0
            more = _CROWD_SIGMA * (1 - known.part) + _GRAPH_SIGMA * work.graph_ratio * (1 - fraction)
            nvml, times = known.nvml, self.times.of(process)
            if nvml.is_exact or (nvml.is_known and not nvml.by_waits):
                sigma = nvml.relative_sigma()
            elif work.owner != process:
                sigma = _PROGRAM_SIGMA
            elif times is None:
                sigma = _MOST_SIGMA
            elif process not in side_by_side:
                had_by_others = had_by_all - known.demand.time * known.part
                sigma = _TURN_SIGMA + _TURN_SIGMA_PER_OTHER * min(1.0, had_by_others)
            else:
                sigma = _LEAST_SIGMA + times.spread
            known.sigma = min(_MOST_SIGMA, math.hypot(sigma + more, _GRID_SIGMA))

    def _prior(self, unit: Unit) -> Unknown:
        owner, function = unit
        if unit == _UNSEEN:
            return Unknown(0.0, _UNSEEN_SIGMA) if self._unseen is None else Unknown(*self._unseen)
        if function:
            return Unknown(self._factor(unit), None)
        known = self._of(owner)
        scale, polled = self._scale(owner, known), known.nvml.scale()
        figure = Figure(known.part * scale.value, known.part * scale.sigma)
        if polled is not None and not known.nvml.is_exact:
            figure = figure.combined(polled)
        return Unknown(figure.value, figure.sigma)

    def _solve(self) -> None:
        """Learns the factors."""
        self._solved = self._evidence.solve(self._prior, self._error**2)
        enough = self._evidence.count >= _ENOUGH_ROWS
        self._error = max(_LEAST_ERROR, self._evidence.error(self._factor)) if enough else _FIRST_ERROR

    def _factor(self, unit: Unit) -> float:
        """1 for work with a duration, 0 for a function without one, until it is solved for."""
        solved = self._solved.get(unit)
        if solved is not None:
            return solved.value
        return 0.0 if unit[1] or unit == _UNSEEN else 1.0

    def _estimates_of_unseen(self, interval_ns: int) -> dict[ProcessId, Estimate]:
        """Of those that NVML credits with time, by their parts of it; the error is that of what they had in a tick."""
        solved = self._solved.get(_UNSEEN)
        if self._unseen is None or solved is None or solved.sigma is None or math.isinf(solved.sigma):
            return {}
        error = NINETY_PERCENT * math.hypot(_ALIKE_IN_TURNS * solved.sigma, self._error)
        parts = {process: self._polled.part(process) * interval_ns for process in self._polled.own_ns}
        return {process: Estimate(part * solved.value, part * error) for process, part in parts.items()}

    def _estimate(self, work: ProcessWork, tick: TickWork, process: ProcessId) -> Estimate:
        sm_ns = variance = 0.0
        for unit, ns in work.units.items():
            solved = self._solved.get(unit)
            if solved is None and unit[1]:
                return Estimate(None, None)
            sm_ns += ns * (solved.value if solved else 1.0)
            sigma = (solved.sigma or 0.0) if solved else math.inf
            variance += (ns * sigma) ** 2 if ns else 0.0
        if math.isinf(variance):
            return Estimate(sm_ns, None)
        sigma_ns = math.sqrt(variance)
        alike = 1.0 if process in tick.side_by_side else _ALIKE_IN_TURNS
        bound_ns = math.hypot(alike * sigma_ns, work.border_sigma_ns(tick.interval_ns))
        return Estimate(sm_ns, NINETY_PERCENT * sigma_ns, NINETY_PERCENT * bound_ns)


def _sum(works: Collection[ProcessWork]) -> dict[Unit, float]:
    total: dict[Unit, float] = {}
    for work in works:
        for unit, value in work.units.items():
            total[unit] = total.get(unit, 0.0) + value
    return total


def _mix(before: float, now: float, memory: float = _FORGETTING) -> float:
    return before * memory + now * (1 - memory)
