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

from agent.attribution.contention import SmDemand, fit_to_activity, shares_in_turns
from agent.attribution.durations import FunctionTimes, Owner, ProgramTimes
from agent.attribution.nnls import Evidence, Unknown
from agent.attribution.process_work import (
    NINETY_PERCENT,
    UNIT_NS,
    Durations,
    Figure,
    NvmlTime,
    ProcessWork,
    Tick,
    Turns,
    Unit,
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
_NOTHING = NvmlTime()
_NO_DEMAND = SmDemand(0.0, 1.0, 0.0)
_UNSEEN: Unit = ("", 0)  # work that no probe sees, where there may be some
_UNSEEN_SIGMA = 0.5  # of the device


@dataclass(frozen=True, slots=True)
class Estimate:
    """SM time in ns of the whole device, ± error, within which it is in nine of ten ticks; None where it is unknown."""

    sm_ns: float | None
    error_ns: float | None


@dataclass(slots=True)
class _Average:
    """An owner's last ticks. `open`: share of the time in which it has work that it has not yet waited for."""

    demand: SmDemand = _NO_DEMAND
    open: float = 0.0
    ticks: int = 0

    def add(self, demand: SmDemand | None, opened: float) -> None:
        """One more; while they are few, all count alike."""
        self.ticks += 1
        memory = min(_FORGETTING, 1 - 1 / self.ticks)
        self.demand = self.demand.averaged(demand, memory)
        self.open = _mix(self.open, opened, memory)


@dataclass(slots=True)
class SmTime:
    """The estimator of one device."""

    times: FunctionTimes
    _programs: ProgramTimes = field(default_factory=ProgramTimes)
    _evidence: Evidence[Unit] = field(default_factory=lambda: Evidence(_FORGETTING, _TICKS))  # shares of the device
    _factors: dict[Unit, float] = field(default_factory=dict)
    _nvml: dict[ProcessId, NvmlTime] = field(default_factory=dict)
    _by_nvml: set[Owner] = field(default_factory=set)  # whose rows have durations by NVML
    _error: float = _FIRST_ERROR
    _averages: dict[Owner, _Average] = field(default_factory=dict)
    _activity: float | None = None
    _parts: dict[Owner, float] = field(default_factory=dict)  # of its demand that each gets
    _sigmas: dict[Owner, float] = field(default_factory=dict)  # the error of that

    def observe(self, tick: Tick, *, others: bool = False) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and estimates it. `others`: some that are not in it may have worked, too."""
        self._programs.observe(tick.deliveries, tick.programs, tick.work)
        known, turns = Durations(self.times, self._programs), Turns.of(tick)
        works = {
            process: work_of(tick, process, known, self._nvml.setdefault(process, NvmlTime()), turns)
            for process, functions in tick.work.items()
            if functions
        }
        changed: set[Owner] = {w.owner for w in works.values() if w.by_nvml != (w.owner in self._by_nvml)}
        self._drop(changed)
        self._by_nvml ^= changed
        if tick.activity_ns is not None and tick.interval_ns:
            parts = {unit: ns / tick.interval_ns for unit, ns in _sum(works.values()).items()}
            self._evidence.add(
                {**parts, _UNSEEN: 1.0} if others else parts, tick.activity_ns / tick.interval_ns, self._factor
            )
            self._update_parts(tick, works)
        self._update_uncertainty(works, tick.side_by_side)
        sigmas = self._solve()
        return {process: self._estimate(work, sigmas) for process, work in works.items()}

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, on the SMs that the function keeps busy; None while it is unknown."""
        own = self.times.per_launch_ns(process, function)
        duration = self._nvml_of(process).per_launch_ns() if own is None else own
        if duration is None:
            factor = self._factors.get((process, function))
            return None if factor is None else factor * UNIT_NS
        return duration * self._factors.get((process, 0), 1.0)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone; in the ticks that are kept, their estimated SM time is taken as final."""
        gone: set[Owner] = set(processes)
        self._drop(gone)
        self._by_nvml -= gone
        self._factors = {unit: factor for unit, factor in self._factors.items() if unit[0] not in gone}
        for process in processes:
            self._nvml.pop(process, None)
            self._averages.pop(process, None)

    def _drop(self, gone: Collection[Owner]) -> None:
        """Takes their estimated SM time as final."""
        if gone:
            self._evidence.drop({unit for unit in self._evidence.keys if unit[0] in gone}, self._factor)

    def _nvml_of(self, owner: Owner) -> NvmlTime:
        return self._nvml.get(owner, _NOTHING) if isinstance(owner, ProcessId) else _NOTHING

    def _scale(self, owner: Owner) -> Figure:
        """The time of an owner's work, were it alone, ÷ that by its waits: exactly by NVML, or as far as waits tell."""
        nvml = self._nvml_of(owner)
        scale = nvml.scale() if nvml.is_exact else None
        if scale is not None:
            return scale
        if nvml.is_known and not nvml.by_waits:
            return Figure(1.0, self._sigmas.get(owner, _MOST_SIGMA))
        times = self.times.of(owner)
        idle = 1 - times.waited_ratio if times else 0.0
        return Figure(1 - _HOST_CUT * idle, self._sigmas.get(owner, _MOST_SIGMA) + _HOST_SIGMA * idle)

    def _update_parts(self, tick: Tick, works: Mapping[ProcessId, ProcessWork]) -> None:
        """Updates the part of its demand that each owner gets: neighbours make each other seem to do more."""
        now: dict[Owner, SmDemand] = {}
        opens: dict[Owner, float] = {}
        for work in works.values():
            if work.time_ns > 0:
                demand = work.demand(tick.interval_ns, self._scale(work.owner).value)
                now[work.owner] = demand.combined(now[work.owner]) if work.owner in now else demand
            opens[work.owner] = opens.get(work.owner, 0.0) + work.open_ns / tick.interval_ns
        for owner in self._averages.keys() | now.keys():
            self._averages.setdefault(owner, _Average()).add(now.get(owner), opens.get(owner, 0.0))
        self._averages = {owner: one for owner, one in self._averages.items() if one.demand.time > _NEGLIGIBLE}
        unknown = (v * self._factor(u) for work in works.values() for u, v in work.units.items() if u[1])
        activity = max(0.0, (tick.activity_ns or 0.0) - sum(unknown)) / tick.interval_ns
        self._activity = activity if self._activity is None else _mix(self._activity, activity)
        demands = {owner: one.demand for owner, one in self._averages.items()}
        clients = {work.owner for process, work in works.items() if process in tick.side_by_side}
        certain = {owner for owner in demands if self._nvml_of(owner).is_exact}
        turns = shares_in_turns({owner: min(1.0, one.open) for owner, one in self._averages.items()})
        most = {o: 1.0 if o in certain | clients else turns[o] / one.time for o, one in demands.items()}
        cut = {owner: min(1.0, part) for owner, part in most.items()}
        if not clients:  # what takes turns is fitted to the activity as a whole: _solve
            self._parts = cut
            return
        demands = {owner: one.scaled_time(cut[owner]) for owner, one in demands.items()}
        parts = fit_to_activity(demands, clients, certain, self._activity)
        self._parts = {owner: cut[owner] * part for owner, part in parts.items()}

    def _update_uncertainty(self, works: Mapping[ProcessId, ProcessWork], side_by_side: Collection[ProcessId]) -> None:
        """Updates the standard deviation of each owner's own figures."""
        had = {owner: one.demand.time * self._parts.get(owner, 1.0) for owner, one in self._averages.items()}
        had_by_all = sum(had.values())
        for process, work in works.items():
            fraction = work.seemed_ns / work.time_ns if work.time_ns else 1.0
            more = _CROWD_SIGMA * (1 - self._parts.get(work.owner, 1.0)) + _GRAPH_SIGMA * work.graph_ratio * (
                1 - fraction
            )
            nvml, times = self._nvml_of(work.owner), self.times.of(process)
            if nvml.is_exact or (nvml.is_known and nvml.scale() is None):
                sigma = nvml.relative_sigma()
            elif work.owner != process:
                sigma = _PROGRAM_SIGMA
            elif times is None:
                sigma = _MOST_SIGMA
            elif process not in side_by_side:
                sigma = _TURN_SIGMA + _TURN_SIGMA_PER_OTHER * min(1.0, had_by_all - had.get(work.owner, 0.0))
            else:
                sigma = _LEAST_SIGMA + times.spread
            self._sigmas[work.owner] = min(_MOST_SIGMA, math.hypot(sigma + more, _GRID_SIGMA))

    def _prior(self, unit: Unit) -> Unknown:
        owner, function = unit
        if unit == _UNSEEN:
            return Unknown(0.0, _UNSEEN_SIGMA)
        if function:
            return Unknown(self._factor(unit), None)
        scale, part, nvml = self._scale(owner), self._parts.get(owner, 1.0), self._nvml_of(owner)
        figure, polled = Figure(part * scale.value, part * scale.sigma), nvml.scale()
        if polled is not None and not nvml.is_exact:
            figure = figure.combined(polled)
        return Unknown(figure.value, figure.sigma)

    def _solve(self) -> dict[Unit, float]:
        """Learns the factors; returns the standard deviation of each."""
        solved = self._evidence.solve(self._prior, self._error**2)
        self._factors = {unit: one.value for unit, one in solved.items()}
        self._sigmas = {owner: sigma for owner, sigma in self._sigmas.items() if (owner, 0) in solved}
        enough = self._evidence.count >= _ENOUGH_ROWS
        self._error = max(_LEAST_ERROR, self._evidence.error(self._factor)) if enough else _FIRST_ERROR
        return {unit: one.sigma or 0.0 for unit, one in solved.items()}

    def _factor(self, unit: Unit) -> float:
        """1 for work with a duration, 0 for a function without one, until it is solved for."""
        return self._factors.get(unit, 0.0 if unit[1] or unit == _UNSEEN else 1.0)

    def _estimate(self, work: ProcessWork, sigmas: Mapping[Unit, float]) -> Estimate:
        if any(function and (owner, function) not in self._factors for owner, function in work.units):
            return Estimate(None, None)
        sm_ns = sum(value * self._factor(unit) for unit, value in work.units.items())
        known = [sigmas.get(unit) for unit in work.units]
        if any(sigma is None or math.isinf(sigma) for sigma in known):
            return Estimate(sm_ns, None)
        errors = (value * (sigmas[unit] or 0.0) for unit, value in work.units.items())
        return Estimate(sm_ns, NINETY_PERCENT * sum(error * error for error in errors) ** 0.5)


def _sum(works: Collection[ProcessWork]) -> dict[Unit, float]:
    total: dict[Unit, float] = {}
    for work in works:
        for unit, value in work.units.items():
            total[unit] = total.get(unit, 0.0) + value
    return total


def _mix(before: float, now: float, memory: float = _FORGETTING) -> float:
    return before * memory + now * (1 - memory)
