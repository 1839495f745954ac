# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much SM time each process had of one device in a tick, estimated, with how far off that may be.

What each process seems to have done comes first (agent/sm_work.py). Those that run side by side under MPS got a part
of that (agent/sharing.py). What the device measured over the last ticks then corrects everybody by one factor:
non-negative least squares, in which each factor is held back as far as its process's own figures are sure. A process
that never waits, and of which NVML says nothing, has functions of unknown duration, for which only the device's
activity speaks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.function_times import FunctionTimes, Owner
from agent.least_squares import Row, Unknown, solve
from agent.model import ProcessId
from agent.program_times import ProgramTimes
from agent.sharing import Demand, fitted, taking_turns
from agent.sm_work import UNIT_NS, Busy, Durations, Tick, Unit, Work, work_of

_TICKS = 40
_FORGETTING = 0.92  # weight of a tick against the next one: durations drift
_LEAST_ERROR, _FIRST_ERROR = 0.05, 0.05  # of a tick: what was launched in one may run in the next
_TOLD_SIGMA = 0.015  # how far off NVML's share of time may be
_MET_SIGMA = 0.04  # and what is made of it for those that run side by side
_PROGRAM_SIGMA = 0.35  # and the deliveries of a program's processes
_LEAST_SIGMA, _MOST_SIGMA = 0.25, 0.7  # and those of one process alone: if it launches slowly they are longer
_CROWD_SIGMA = 0.15
_GRAPH_SIGMA = 0.1
_MOST_UNKNOWNS = 48
_ENOUGH_ROWS = 5
_NOTHING = 1e-6  # of a device

_Row = tuple[Mapping[Unit, float], float, float]  # what each seems to have done, what the device did, length; ns


@dataclass(frozen=True, slots=True)
class Estimate:
    """SM time in ns of the whole device, ± error; None where nothing tells."""

    sm_ns: float | None
    error_ns: float | None


@dataclass(slots=True)
class SmTime:
    """One device."""

    times: FunctionTimes
    _programs: ProgramTimes = field(default_factory=ProgramTimes)
    _rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=_TICKS))
    _factors: dict[Unit, float] = field(default_factory=dict)
    _busy: dict[ProcessId, Busy] = field(default_factory=dict)
    _error: float = _FIRST_ERROR
    _demands: dict[Owner, Demand] = field(default_factory=dict)
    _opens: dict[Owner, float] = field(default_factory=dict)
    _activity: float | None = None
    _parts: dict[Owner, float] = field(default_factory=dict)  # of its demand that each seems to get
    _sigmas: dict[Owner, float] = field(default_factory=dict)  # how far off that may be

    def observe(self, tick: Tick) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and splits it."""
        self._programs.observe(tick.deliveries, tick.programs, tick.work)
        known = Durations(self.times, self._programs)
        works = {
            process: work_of(tick, process, known, self._busy.setdefault(process, Busy()))
            for process, functions in tick.work.items()
            if functions
        }
        if tick.activity_ns is not None and tick.interval_ns:
            self._rows.append((_sum(works.values()), tick.activity_ns, float(tick.interval_ns)))
            self._share(tick, works)
        self._doubt(works, tick.side_by_side)
        sigmas = self._solve()
        return {process: self._estimate(work, sigmas) for process, work in works.items()}

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, of the SMs that the function keeps busy; None while nothing tells."""
        own, busy = self.times.per_launch_ns(process, function), self._busy.get(process, Busy())
        duration = busy.per_launch_ns() if own is None else own * busy.scale()
        if duration is None:
            factor = self._factors.get((process, function))
            return None if factor is None else factor * UNIT_NS
        return duration * self._factors.get((process, 0), 1.0)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """They are gone; in the ticks that are kept, what they are believed to have done is settled."""
        gone: set[Owner] = set(processes)
        self._rows = deque((self._without(gone, row) for row in self._rows), maxlen=_TICKS)
        self._factors = {unit: factor for unit, factor in self._factors.items() if unit[0] not in gone}
        for process in processes:
            self._busy.pop(process, None)
            self._demands.pop(process, None)
            self._opens.pop(process, None)

    def _without(self, gone: Collection[Owner], row: _Row) -> _Row:
        coefficients, seen, interval = row
        if not any(owner in gone for owner, _ in coefficients):
            return row
        did = sum(value * self._factor(unit) for unit, value in coefficients.items() if unit[0] in gone)
        kept = {unit: value for unit, value in coefficients.items() if unit[0] not in gone}
        return kept, max(0.0, seen - did), interval

    def _is_told(self, owner: Owner) -> bool:
        return isinstance(owner, ProcessId) and owner in self._busy and self._busy[owner].is_known

    def _share(self, tick: Tick, works: Mapping[ProcessId, Work]) -> None:
        """Side by side each is slowed by the others, so that they seem to have done more than they did."""
        now: dict[Owner, Demand] = {}
        for work in works.values():
            if work.time_ns > 0:
                demand = work.demand(tick.interval_ns)
                now[work.owner] = demand.beside(now[work.owner]) if work.owner in now else demand
        for owner in self._demands.keys() | now.keys():
            known, new = self._demands.get(owner), now.get(owner)
            self._demands[owner] = new if known is None and new else (known or Demand(0, 1, 0)).mixed(new, _FORGETTING)
        self._demands = {owner: one for owner, one in self._demands.items() if one.time > _NOTHING}
        unknown = (v * self._factor(u) for work in works.values() for u, v in work.units.items() if u[1])
        activity = max(0.0, (tick.activity_ns or 0.0) - sum(unknown)) / tick.interval_ns
        self._activity = activity if self._activity is None else _mix(self._activity, activity)
        demands = self._demands
        clients = {work.owner for process, work in works.items() if process in tick.side_by_side}
        sure = {owner for owner in demands if self._is_told(owner)}
        turns = taking_turns({owner: min(1.0, time) for owner, time in self._open(tick, works).items()})
        most = {o: 1.0 if o in sure | clients or o not in turns else turns[o] / one.time for o, one in demands.items()}
        cut = {owner: min(1.0, part) for owner, part in most.items()}
        demands = {owner: one.scaled_time(cut[owner]) for owner, one in demands.items()}
        parts = fitted(demands, clients, sure, self._activity)
        self._parts = {owner: cut[owner] * part for owner, part in parts.items()}

    def _open(self, tick: Tick, works: Mapping[ProcessId, Work]) -> Mapping[Owner, float]:
        """Share of the time in which each owner has work that it has not yet waited for, over the last ticks."""
        now: dict[Owner, float] = {}
        for work in works.values():
            now[work.owner] = now.get(work.owner, 0.0) + work.open_ns / tick.interval_ns
        for owner in self._opens.keys() | now.keys():
            before = self._opens.get(owner)
            self._opens[owner] = now[owner] if before is None else _mix(before, now.get(owner, 0.0))
        self._opens = {owner: time for owner, time in self._opens.items() if owner in self._demands}
        return self._opens

    def _doubt(self, works: Mapping[ProcessId, Work], side_by_side: Collection[ProcessId]) -> None:
        """How far off each owner's figures may be by themselves."""
        for process, work in works.items():
            fraction = work.seemed_ns / work.time_ns if work.time_ns else 1.0
            more = _CROWD_SIGMA * (1 - self._parts.get(work.owner, 1.0)) + _GRAPH_SIGMA * work.graph_ratio * (
                1 - fraction
            )
            if self._is_told(work.owner):
                sigma = _MET_SIGMA if process in side_by_side else _TOLD_SIGMA
            elif work.owner != process:
                sigma = _PROGRAM_SIGMA
            else:
                spread = self.times.spread(process)
                sigma = _MOST_SIGMA if spread is None else _LEAST_SIGMA + spread
            self._sigmas[work.owner] = min(_MOST_SIGMA, sigma + more)

    def _before(self, unit: Unit) -> Unknown:
        owner, function = unit
        if function:
            return Unknown(self._factor(unit), None)
        return Unknown(self._parts.get(owner, 1.0), self._sigmas.get(owner, _MOST_SIGMA))

    def _solve(self) -> dict[Unit, float]:
        """Learns the factors; returns how sure each is."""
        weights: dict[Unit, float] = {}
        for coefficients, _, _ in self._rows:
            for unit, value in coefficients.items():
                weights[unit] = weights.get(unit, 0.0) + value
        units = sorted(weights, key=lambda unit: -weights[unit])[:_MOST_UNKNOWNS]
        unknowns = [self._before(unit) for unit in units]
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
        """How far off the ticks are with these factors: root mean square, of a tick."""
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
        """What has a duration is taken as it seems to be; what has none, as nothing, until it is solved for."""
        return self._factors.get(unit, 0.0 if unit[1] else 1.0)

    def _estimate(self, work: Work, sigmas: Mapping[Unit, float]) -> Estimate:
        if any(function and (owner, function) not in self._factors for owner, function in work.units):
            return Estimate(None, None)
        sm_ns = sum(value * self._factor(unit) for unit, value in work.units.items())
        known = [sigmas.get(unit) for unit in work.units]
        if any(sigma is None or math.isinf(sigma) for sigma in known):
            return Estimate(sm_ns, None)
        errors = (value * (sigmas[unit] or 0.0) for unit, value in work.units.items())
        return Estimate(sm_ns, sum(error * error for error in errors) ** 0.5)


def _sum(works: Collection[Work]) -> dict[Unit, float]:
    total: dict[Unit, float] = {}
    for work in works:
        for unit, value in work.units.items():
            total[unit] = total.get(unit, 0.0) + value
    return total


def _mix(before: float, now: float) -> float:
    return before * _FORGETTING + now * (1 - _FORGETTING)
