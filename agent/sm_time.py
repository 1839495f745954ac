# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much SM time each process had of one device in a tick, estimated, with how far off that may be.

What each process seems to have done comes first: launches × durations (agent/function_times.py) × the share of SMs that
such grids keep busy. While processes take turns, NVML's share of time says how far to scale that. What the device
measured over the last ticks then corrects every process by one factor: non-negative least squares, in which each factor
is held back as far as its process's own figures are sure. A process that never waits has no durations of its own: its
functions are unknowns themselves, for which only the device's activity speaks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from agent.function_times import FunctionTimes
from agent.least_squares import Row, Unknown, solve
from agent.model import ProcessId
from agent.occupancy import sm_fraction
from agent.sharing import Demand, fitted
from agent.tally import Launched

_TICKS = 40
_FORGETTING = 0.92  # weight of a tick against the next one: durations drift
_LEAST_ERROR, _FIRST_ERROR = 0.02, 0.05  # of a tick: what was launched in one may run in the next
_TOLD_SIGMA = 0.04
_LEAST_SIGMA, _MOST_SIGMA = 0.10, 0.7
_CROWD_SIGMA = 0.3
_GRAPH_SIGMA = 0.1
_MOST_UNKNOWNS = 48
_UNIT_NS = 10_000.0  # so that the unknowns of functions without a duration are of the order of 1
_BUSY_MEMORY = 0.8
_ENOUGH_BUSY = 2.0  # ticks
_ENOUGH_ROWS = 5

Unit = tuple[ProcessId, int]  # a process's factor (function 0), or a function's duration
_Row = tuple[Mapping[Unit, float], float, float]  # what each seems to have done, what the device did, length; ns


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


@dataclass(frozen=True, slots=True)
class Estimate:
    """SM time in ns of the whole device, ± error."""

    sm_ns: float
    error_ns: float | None


@dataclass(slots=True)
class _Busy:
    """NVML's time of a process against what its deliveries say and against its launches, over the last ticks."""

    told: float = 0.0
    believed: float = 0.0
    launches: float = 0.0
    ticks: float = 0.0
    fraction: float = 1.0  # of the SMs that its work of the last tick would keep busy by itself
    kernel_ns: float = 0.0  # of that tick, on average
    graphs: float = 0.0  # the part of that work that graphs were: only their kernels' mean grid is known

    def demand(self, seemed: float) -> Demand:
        return Demand(seemed * self.scale() / self.fraction, self.fraction, self.kernel_ns * self.scale())

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
        return self.ticks >= _ENOUGH_BUSY

    def scale(self) -> float:
        return self.told / self.believed if self.is_known and self.believed > 0 else 1.0

    def per_launch_ns(self) -> float | None:
        return self.told / self.launches if self.is_known else None


@dataclass(slots=True)
class SmTime:
    """One device."""

    times: FunctionTimes
    _rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=_TICKS))
    _factors: dict[Unit, float] = field(default_factory=dict)
    _busy: dict[ProcessId, _Busy] = field(default_factory=dict)
    _error: float = _FIRST_ERROR
    _demands: dict[ProcessId, float] = field(default_factory=dict)  # share of SM time that each seems to have, unscaled
    _activity: float | None = None
    _parts: dict[ProcessId, float] = field(default_factory=dict)  # of its demand that each seems to get

    def observe(self, tick: Tick) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and splits it."""
        own = {process: self._own(tick, process, work) for process, work in tick.work.items() if work}
        if tick.activity_ns is not None and tick.interval_ns:
            coefficients = {unit: value for units in own.values() for unit, value in units.items()}
            self._rows.append((coefficients, tick.activity_ns, float(tick.interval_ns)))
            self._share(tick, own)
        sigmas = self._solve(tick)
        return {process: self._estimate(process, self._scaled(units), sigmas) for process, units in own.items()}

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, of the SMs that the function keeps busy; None while nothing tells."""
        own, busy = self.times.per_launch_ns(process, function), self._busy.get(process, _Busy())
        duration = busy.per_launch_ns() if own is None else own * busy.scale()
        if duration is None:
            factor = self._factors.get((process, function))
            return None if factor is None else factor * _UNIT_NS
        return duration * self._factors.get((process, 0), 1.0)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """They are gone; in the ticks that are kept, what they are believed to have done is settled."""
        gone = set(processes)
        self._rows = deque((self._without(gone, row) for row in self._rows), maxlen=_TICKS)
        self._factors = {unit: factor for unit, factor in self._factors.items() if unit[0] not in gone}
        for process in gone:
            self._busy.pop(process, None)
            self._demands.pop(process, None)

    def _without(self, gone: Collection[ProcessId], row: _Row) -> _Row:
        coefficients, seen, interval = row
        if not any(process in gone for process, _ in coefficients):
            return row
        scaled = self._scaled(coefficients)
        did = sum(value * self._factors.get(unit, 1.0) for unit, value in scaled.items() if unit[0] in gone)
        kept = {unit: value for unit, value in coefficients.items() if unit[0] not in gone}
        return kept, max(0.0, seen - did), interval

    def _own(self, tick: Tick, process: ProcessId, work: Mapping[int, Launched]) -> dict[Unit, float]:
        """What the process seems to have done: ns per unknown, each of which is 1 where that is right."""
        busy = self._busy.setdefault(process, _Busy())
        durations = {function: self._duration(tick, process, function) for function in work}
        believed = sum(one.launches * (durations[function] or 0.0) for function, one in work.items())
        rate = tick.interval_ns / tick.counted_ns if tick.counted_ns else 1.0
        busy.observe(believed * rate, rate * sum(one.launches for one in work.values()), tick.busy_ns.get(process))
        units: dict[Unit, float] = {}
        spent = graphs = 0.0
        for function, one in work.items():
            fraction = _fraction(tick, process, one) * rate
            own = durations[function]
            duration = busy.per_launch_ns() if own is None else own
            if duration is None:
                units[process, function or -1] = one.launches * fraction * _UNIT_NS
            else:
                units[process, 0] = units.get((process, 0), 0.0) + one.launches * duration * fraction
                spent += one.launches * duration * rate
                graphs += one.launches * duration * rate if one.kernels > one.launches else 0.0
        if spent:
            busy.fraction, busy.graphs = units[process, 0] / spent, graphs / spent
            busy.kernel_ns = spent / rate / max(1, sum(one.kernels for one in work.values()))
        return units

    def _duration(self, tick: Tick, process: ProcessId, function: int) -> float | None:
        """By the process's waits. One that works on several devices waits for the slowest of them: that says little."""
        return None if process in tick.on_many_devices else self.times.per_launch_ns(process, function)

    def _scaled(self, coefficients: Mapping[Unit, float]) -> dict[Unit, float]:
        """With what NVML says by now: the waits of all ticks that are looked at were as long for the same reason."""
        return {unit: v if unit[1] else v * self._busy[unit[0]].scale() for unit, v in coefficients.items()}

    def _share(self, tick: Tick, own: Mapping[ProcessId, Mapping[Unit, float]]) -> None:
        """Side by side each is slowed by the others, so that they seem to have done more than they did."""
        seconds = float(tick.interval_ns)
        for process in self._demands.keys() | own.keys():
            units = own.get(process, {})
            seemed = units.get((process, 0), 0.0) / seconds
            self._demands[process] = _mix(self._demands.get(process, seemed), seemed)
        unknown = (v * self._factors.get(u, 0.0) for units in own.values() for u, v in units.items() if u[1])
        activity = max(0.0, (tick.activity_ns or 0.0) - sum(unknown)) / seconds
        self._activity = activity if self._activity is None else _mix(self._activity, activity)
        demands = {p: self._busy[p].demand(seemed) for p, seemed in self._demands.items() if seemed > 1e-6}
        self._parts = fitted(demands, set(tick.side_by_side), self._activity)

    def _sigma(self, tick: Tick, process: ProcessId) -> float:
        busy = self._busy.get(process, _Busy())
        more = _CROWD_SIGMA * (1 - self._parts.get(process, 1.0)) + _GRAPH_SIGMA * busy.graphs * (1 - busy.fraction)
        if busy.is_known:
            return _TOLD_SIGMA + more
        spread = self.times.spread(process)
        return _MOST_SIGMA if spread is None else min(_MOST_SIGMA, _LEAST_SIGMA + spread + more)

    def _before(self, tick: Tick, unit: Unit) -> Unknown:
        process, function = unit
        if function:
            return Unknown(self._factors.get(unit, 0.0), None)
        return Unknown(self._parts.get(process, 1.0), self._sigma(tick, process))

    def _solve(self, tick: Tick) -> dict[Unit, float]:
        """Learns the factors; returns how sure each is."""
        scaled = [(self._scaled(coefficients), seen, interval) for coefficients, seen, interval in self._rows]
        weights: dict[Unit, float] = {}
        for coefficients, _, _ in scaled:
            for unit, value in coefficients.items():
                weights[unit] = weights.get(unit, 0.0) + value
        units = sorted(weights, key=lambda unit: -weights[unit])[:_MOST_UNKNOWNS]
        unknowns = [self._before(tick, unit) for unit in units]
        rows = []
        age = 1.0
        for coefficients, seen, interval in reversed(scaled):
            kept = sum(v * self._factors.get(u, 1.0) for u, v in coefficients.items() if u not in weights)
            weight = age / (self._error * interval) ** 2
            rows.append(Row([coefficients.get(unit, 0.0) for unit in units], seen - kept, weight))
            age *= _FORGETTING
        values, sigmas = solve(unknowns, rows)
        self._factors = dict(zip(units, values, strict=True))
        self._error = self._residual(scaled)
        return dict(zip(units, sigmas, strict=True))

    def _residual(self, rows: Sequence[_Row]) -> float:
        """How far off the ticks are with these factors: root mean square, of a tick."""
        total = square = 0.0
        age = 1.0
        for coefficients, seen, interval in reversed(rows):
            off = (seen - sum(v * self._factors.get(u, 1.0) for u, v in coefficients.items())) / interval
            square += age * off * off
            total += age
            age *= _FORGETTING
        if len(rows) < _ENOUGH_ROWS:
            return _FIRST_ERROR
        return max(_LEAST_ERROR, math.sqrt(square / total))

    def _estimate(self, process: ProcessId, units: Mapping[Unit, float], sigmas: Mapping[Unit, float]) -> Estimate:
        sm_ns = sum(value * self._factors.get(unit, 1.0) for unit, value in units.items())
        known = [sigmas.get(unit) for unit in units]
        if any(sigma is None or sigma == float("inf") for sigma in known):
            return Estimate(sm_ns, None)
        errors = (value * (sigmas[unit] or 0.0) for unit, value in units.items())
        return Estimate(sm_ns, sum(error * error for error in errors) ** 0.5)


def _mix(before: float, now: float) -> float:
    return before * _FORGETTING + now * (1 - _FORGETTING)


def _fraction(tick: Tick, process: ProcessId, one: Launched) -> float:
    """Share of the device's SMs that a launch keeps busy while it runs."""
    if not tick.is_share_of_sms:
        return 1.0
    limit = tick.sm_limits.get(process, 1.0)
    if not one.blocks or not tick.sm_count:
        return limit
    usable = max(1, round(tick.sm_count * limit))
    blocks = one.blocks / max(1, one.kernels)
    return sm_fraction(blocks, one.threads_per_block, usable) * usable / tick.sm_count
