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

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.function_times import FunctionTimes
from agent.least_squares import Row, Unknown, solve
from agent.model import ProcessId
from agent.occupancy import sm_fraction
from agent.tally import Launched

_TICKS = 40
_FORGETTING = 0.92  # weight of a tick against the next one: durations drift
_DEVICE_ERROR = 0.02  # of a tick: its activity is read a little before or after the counts
_QUEUE_ERROR = 0.1  # of the activity: what was launched in one tick may run in the next
_TURNS_SIGMA = 0.06
_LEAST_SIGMA, _MOST_SIGMA = 0.10, 0.7
_MANY_DEVICES_SIGMA = 0.5
_MOST_UNKNOWNS = 48
_UNIT_NS = 10_000.0  # so that the unknowns of functions without a duration are of the order of 1
_BUSY_MEMORY = 0.8
_ENOUGH_BUSY = 2.0  # ticks

Unit = tuple[ProcessId, int]  # a process's factor (function 0), or a function's duration


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of one device. Times in ns; `busy_ns`: NVML's, empty while processes run side by side."""

    interval_ns: int
    activity_ns: float | None  # SM time of the whole device
    is_share_of_sms: bool  # False: `activity` is a share of time, as GPUs before Hopper tell it
    sm_count: int | None
    work: Mapping[ProcessId, Mapping[int, Launched]]
    busy_ns: Mapping[ProcessId, float]
    sm_limits: Mapping[ProcessId, float]  # share of the SMs that an MPS client may use
    on_many_devices: Collection[ProcessId] = ()


@dataclass(frozen=True, slots=True)
class Estimate:
    """SM time in ns of the whole device, ± error."""

    sm_ns: float
    error_ns: float | None


@dataclass(slots=True)
class _Busy:
    told: float = 0.0
    believed: float = 0.0
    ticks: float = 0.0


@dataclass(slots=True)
class SmTime:
    """One device."""

    times: FunctionTimes
    _rows: deque[tuple[dict[Unit, float], float, float]] = field(default_factory=lambda: deque(maxlen=_TICKS))
    _factors: dict[Unit, float] = field(default_factory=dict)
    _busy: dict[ProcessId, _Busy] = field(default_factory=dict)

    def observe(self, tick: Tick) -> dict[ProcessId, Estimate]:
        """Learns from a tick, and splits it."""
        own = {process: self._own(tick, process, work) for process, work in tick.work.items() if work}
        if tick.activity_ns is not None and tick.interval_ns:
            coefficients = {unit: value for units in own.values() for unit, value in units.items()}
            error = _DEVICE_ERROR * tick.interval_ns + _QUEUE_ERROR * tick.activity_ns
            self._rows.append((coefficients, tick.activity_ns, error))
        sigmas = self._solve(tick)
        return {process: self._estimate(process, units, sigmas) for process, units in own.items()}

    def gpu_ns(self, process: ProcessId, function: int) -> float | None:
        """GPU time per launch, of the SMs that the function keeps busy; None while nothing tells."""
        own = self.times.per_launch_ns(process, function)
        if own is None:
            factor = self._factors.get((process, function))
            return None if factor is None else factor * _UNIT_NS
        return own * self._scale(process) * self._factors.get((process, 0), 1.0)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """They are gone; the ticks that they were in grow old by themselves."""
        gone = set(processes)
        for unit in [unit for unit in self._factors if unit[0] in gone]:
            del self._factors[unit]
        for process in gone:
            self._busy.pop(process, None)

    def _own(self, tick: Tick, process: ProcessId, work: Mapping[int, Launched]) -> dict[Unit, float]:
        """What the process seems to have done: ns per unknown, each of which is 1 where that is right."""
        units: dict[Unit, float] = {}
        believed = 0.0
        for function, one in work.items():
            fraction = _fraction(tick, process, one)
            duration = self.times.per_launch_ns(process, function)
            if duration is None:
                units[process, function or -1] = one.launches * fraction * _UNIT_NS
            else:
                believed += one.launches * duration
                units[process, 0] = units.get((process, 0), 0.0) + one.launches * duration * fraction
        self._compare(process, believed, tick.busy_ns.get(process))
        if (process, 0) in units:
            units[process, 0] *= self._scale(process)
        return units

    def _compare(self, process: ProcessId, believed: float, told: float | None) -> None:
        busy = self._busy.setdefault(process, _Busy())
        if told is None or believed <= 0:
            return
        busy.told = busy.told * _BUSY_MEMORY + told
        busy.believed = busy.believed * _BUSY_MEMORY + believed
        busy.ticks = busy.ticks * _BUSY_MEMORY + 1

    def _scale(self, process: ProcessId) -> float:
        """NVML's time against that which the deliveries say."""
        busy = self._busy.get(process)
        if busy is None or busy.ticks < _ENOUGH_BUSY or busy.believed <= 0:
            return 1.0
        return busy.told / busy.believed

    def _sigma(self, tick: Tick, process: ProcessId) -> float:
        if process in tick.busy_ns and self._scale(process) != 1.0:
            return _TURNS_SIGMA
        if process in tick.on_many_devices:
            return _MANY_DEVICES_SIGMA
        spread = self.times.spread(process)
        return _MOST_SIGMA if spread is None else min(_MOST_SIGMA, _LEAST_SIGMA + spread)

    def _solve(self, tick: Tick) -> dict[Unit, float]:
        """Learns the factors; returns how sure each is."""
        weights: dict[Unit, float] = {}
        for coefficients, _, _ in self._rows:
            for unit, value in coefficients.items():
                weights[unit] = weights.get(unit, 0.0) + value
        units = sorted(weights, key=lambda unit: -weights[unit])[:_MOST_UNKNOWNS]
        unknowns = [
            Unknown(1.0, self._sigma(tick, process)) if not function else Unknown(self._factors.get(unit, 0.0), None)
            for unit in units
            for process, function in (unit,)
        ]
        rows = []
        age = 1.0
        for coefficients, seen, error in reversed(self._rows):
            kept = sum(v * self._factors.get(u, 1.0) for u, v in coefficients.items() if u not in weights)
            rows.append(Row([coefficients.get(unit, 0.0) for unit in units], seen - kept, age / error**2))
            age *= _FORGETTING
        values, sigmas = solve(unknowns, rows)
        self._factors = dict(zip(units, values, strict=True))
        return dict(zip(units, sigmas, strict=True))

    def _estimate(self, process: ProcessId, units: Mapping[Unit, float], sigmas: Mapping[Unit, float]) -> Estimate:
        sm_ns = sum(value * self._factors.get(unit, 1.0) for unit, value in units.items())
        known = [sigmas.get(unit) for unit in units]
        if any(sigma is None or sigma == float("inf") for sigma in known):
            return Estimate(sm_ns, None)
        errors = (value * (sigmas[unit] or 0.0) for unit, value in units.items())
        return Estimate(sm_ns, sum(error * error for error in errors) ** 0.5)


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
