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
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.attribution.contention import SmDemand, fit_to_activity, shares_in_turns
from agent.attribution.durations import FunctionTimes, Owner, ProgramTimes
from agent.attribution.nnls import Row, Unknown, solve
from agent.attribution.process_work import UNIT_NS, Durations, NvmlTime, ProcessWork, Tick, Unit, work_of
from agent.core.model import ProcessId

_TICKS = 40
_FORGETTING = 0.92  # weight of a tick against the next one: durations drift
_LEAST_ERROR, _FIRST_ERROR = 0.05, 0.05  # of a tick: what was launched in one may run in the next
_NVML_SIGMA = 0.015  # error of NVML's share of time
_CONTENDED_SIGMA = 0.04  # the same for MPS clients, whose part is computed from it
_PROGRAM_SIGMA = 0.35  # of the deliveries of a program's processes
_LEAST_SIGMA, _MOST_SIGMA = 0.25, 0.7  # of the deliveries of one process: they are longer if it launches slowly
_CROWD_SIGMA = 0.15
_GRAPH_SIGMA = 0.1
_MOST_UNKNOWNS = 48
_ENOUGH_ROWS = 5
_NEGLIGIBLE = 1e-6  # of a device
_Row = tuple[Mapping[Unit, float], float, float]  # apparent SM time by unit, the device's SM time, length; ns


@dataclass(frozen=True, slots=True)
class Estimate:
    """SM time in ns of the whole device, ± error; None where it is unknown."""

    sm_ns: float | None
    error_ns: float | None


@dataclass(slots=True)
class SmTime:
    """The estimator of one device."""

    times: FunctionTimes
    _programs: ProgramTimes = field(default_factory=ProgramTimes)
    _rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=_TICKS))
    _factors: dict[Unit, float] = field(default_factory=dict)
    _nvml: dict[ProcessId, NvmlTime] = field(default_factory=dict)
    _error: float = _FIRST_ERROR
    _demands: dict[Owner, SmDemand] = field(default_factory=dict)
    _opens: dict[Owner, float] = field(default_factory=dict)
    _activity: float | None = None
    _parts: dict[Owner, float] = field(default_factory=dict)  # of its demand that each gets
    _sigmas: dict[Owner, float] = field(default_factory=dict)  # the error of that

    def observe(self, tick: Tick) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and estimates it."""
        self._programs.observe(tick.deliveries, tick.programs, tick.work)
        known = Durations(self.times, self._programs)
        works = {
            process: work_of(tick, process, known, self._nvml.setdefault(process, NvmlTime()))
            for process, functions in tick.work.items()
            if functions
        }
        if tick.activity_ns is not None and tick.interval_ns:
            self._rows.append((_sum(works.values()), tick.activity_ns, float(tick.interval_ns)))
            self._update_parts(tick, works)
        self._update_uncertainty(works, tick.side_by_side)
        sigmas = self._solve()
        return {process: self._estimate(work, sigmas) for process, work in works.items()}

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, on the SMs that the function keeps busy; None while it is unknown."""
        own, nvml = self.times.per_launch_ns(process, function), self._nvml.get(process, NvmlTime())
        duration = nvml.per_launch_ns() if own is None else own * nvml.scale()
        if duration is None:
            factor = self._factors.get((process, function))
            return None if factor is None else factor * UNIT_NS
        return duration * self._factors.get((process, 0), 1.0)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone; in the ticks that are kept, their estimated SM time is taken as final."""
        gone: set[Owner] = set(processes)
        self._rows = deque((self._without(gone, row) for row in self._rows), maxlen=_TICKS)
        self._factors = {unit: factor for unit, factor in self._factors.items() if unit[0] not in gone}
        for process in processes:
            self._nvml.pop(process, None)
            self._demands.pop(process, None)
            self._opens.pop(process, None)

    def _without(self, gone: Collection[Owner], row: _Row) -> _Row:
        coefficients, seen, interval = row
        if not any(owner in gone for owner, _ in coefficients):
            return row
        did = sum(value * self._factor(unit) for unit, value in coefficients.items() if unit[0] in gone)
        kept = {unit: value for unit, value in coefficients.items() if unit[0] not in gone}
        return kept, max(0.0, seen - did), interval

    def _has_nvml_time(self, owner: Owner) -> bool:
        return isinstance(owner, ProcessId) and owner in self._nvml and self._nvml[owner].is_known

    def _update_parts(self, tick: Tick, works: Mapping[ProcessId, ProcessWork]) -> None:
        """Updates the part of its demand that each owner gets: neighbours make each other seem to do more."""
        now: dict[Owner, SmDemand] = {}
        for work in works.values():
            if work.time_ns > 0:
                demand = work.demand(tick.interval_ns)
                now[work.owner] = demand.combined(now[work.owner]) if work.owner in now else demand
        for owner in self._demands.keys() | now.keys():
            known, new = self._demands.get(owner), now.get(owner)
            self._demands[owner] = (
                new if known is None and new else (known or SmDemand(0, 1, 0)).averaged(new, _FORGETTING)
            )
        self._demands = {owner: one for owner, one in self._demands.items() if one.time > _NEGLIGIBLE}
        unknown = (v * self._factor(u) for work in works.values() for u, v in work.units.items() if u[1])
        activity = max(0.0, (tick.activity_ns or 0.0) - sum(unknown)) / tick.interval_ns
        self._activity = activity if self._activity is None else _mix(self._activity, activity)
        demands = self._demands
        clients = {work.owner for process, work in works.items() if process in tick.side_by_side}
        certain = {owner for owner in demands if self._has_nvml_time(owner)}
        turns = shares_in_turns({owner: min(1.0, time) for owner, time in self._open(tick, works).items()})
        most = {
            o: 1.0 if o in certain | clients or o not in turns else turns[o] / one.time for o, one in demands.items()
        }
        cut = {owner: min(1.0, part) for owner, part in most.items()}
        demands = {owner: one.scaled_time(cut[owner]) for owner, one in demands.items()}
        parts = fit_to_activity(demands, clients, certain, self._activity)
        self._parts = {owner: cut[owner] * part for owner, part in parts.items()}

    def _open(self, tick: Tick, works: Mapping[ProcessId, ProcessWork]) -> Mapping[Owner, float]:
        """Share of the time in which each owner has work that it has not yet waited for, over the last ticks."""
        now: dict[Owner, float] = {}
        for work in works.values():
            now[work.owner] = now.get(work.owner, 0.0) + work.open_ns / tick.interval_ns
        for owner in self._opens.keys() | now.keys():
            before = self._opens.get(owner)
            self._opens[owner] = now[owner] if before is None else _mix(before, now.get(owner, 0.0))
        self._opens = {owner: time for owner, time in self._opens.items() if owner in self._demands}
        return self._opens

    def _update_uncertainty(self, works: Mapping[ProcessId, ProcessWork], side_by_side: Collection[ProcessId]) -> None:
        """Updates the standard deviation of each owner's own figures."""
        for process, work in works.items():
            fraction = work.seemed_ns / work.time_ns if work.time_ns else 1.0
            more = _CROWD_SIGMA * (1 - self._parts.get(work.owner, 1.0)) + _GRAPH_SIGMA * work.graph_ratio * (
                1 - fraction
            )
            if self._has_nvml_time(work.owner):
                sigma = _CONTENDED_SIGMA if process in side_by_side else _NVML_SIGMA
            elif work.owner != process:
                sigma = _PROGRAM_SIGMA
            else:
                spread = self.times.spread(process)
                sigma = _MOST_SIGMA if spread is None else _LEAST_SIGMA + spread
            self._sigmas[work.owner] = min(_MOST_SIGMA, sigma + more)

    def _prior(self, unit: Unit) -> Unknown:
        owner, function = unit
        if function:
            return Unknown(self._factor(unit), None)
        return Unknown(self._parts.get(owner, 1.0), self._sigmas.get(owner, _MOST_SIGMA))

    def _solve(self) -> dict[Unit, float]:
        """Learns the factors; returns the standard deviation of each."""
        weights: dict[Unit, float] = {}
        for coefficients, _, _ in self._rows:
            for unit, value in coefficients.items():
                weights[unit] = weights.get(unit, 0.0) + value
        units = sorted(weights, key=lambda unit: -weights[unit])[:_MOST_UNKNOWNS]
        unknowns = [self._prior(unit) for unit in units]
        kept = set(units)
        rows = []
        age = 1.0
        for coefficients, seen, interval in reversed(self._rows):
            others = sum(v * self._factor(u) for u, v in coefficients.items() if u not in kept)
            weight = age / (self._error * interval) ** 2
            rows.append(Row([coefficients.get(unit, 0.0) for unit in units], seen - others, weight))
            age *= _FORGETTING
        values, sigmas = solve(unknowns, rows)
        self._factors = dict(zip(units, values, strict=True))
        self._sigmas = {owner: sigma for owner, sigma in self._sigmas.items() if (owner, 0) in weights}
        self._error = self._residual()
        return dict(zip(units, sigmas, strict=True))

    def _residual(self) -> float:
        """Root mean square error of the ticks with these factors, as a ratio of a tick."""
        total = square = 0.0
        age = 1.0
        for coefficients, seen, interval in reversed(self._rows):
            off = (seen - sum(v * self._factor(u) for u, v in coefficients.items())) / interval
            square += age * off * off
            total += age
            age *= _FORGETTING
        if len(self._rows) < _ENOUGH_ROWS:
            return _FIRST_ERROR
        return max(_LEAST_ERROR, math.sqrt(square / total))

    def _factor(self, unit: Unit) -> float:
        """1 for work with a duration, 0 for a function without one, until it is solved for."""
        return self._factors.get(unit, 0.0 if unit[1] else 1.0)

    def _estimate(self, work: ProcessWork, sigmas: Mapping[Unit, float]) -> Estimate:
        if any(function and (owner, function) not in self._factors for owner, function in work.units):
            return Estimate(None, None)
        sm_ns = sum(value * self._factor(unit) for unit, value in work.units.items())
        known = [sigmas.get(unit) for unit in work.units]
        if any(sigma is None or math.isinf(sigma) for sigma in known):
            return Estimate(sm_ns, None)
        errors = (value * (sigmas[unit] or 0.0) for unit, value in work.units.items())
        return Estimate(sm_ns, sum(error * error for error in errors) ** 0.5)


def _sum(works: Collection[ProcessWork]) -> dict[Unit, float]:
    total: dict[Unit, float] = {}
    for work in works:
        for unit, value in work.units.items():
            total[unit] = total.get(unit, 0.0) + value
    return total


def _mix(before: float, now: float) -> float:
    return before * _FORGETTING + now * (1 - _FORGETTING)
