# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""GPU time per launch, from a process's own waits, without any profiler: per function, per process, and per program.

A delivery is a stretch between two drained waits: so much was launched, so long it took.

Per function (`FunctionTimes`): each delivery moves the durations of its functions a part of the way towards what it
says (normalised least mean squares). Other processes on the device and a slow program make a delivery longer, never
shorter, so a longer one moves them less than a shorter one: they settle near the lower edge of what is seen, which is
what the work takes by itself.

Per process (`LaunchTimes`): if it launched without pause, the GPU was busy from the first launch to the return of the
wait (less what online requests took of that time). If it was paced, what we believed to be queued when the wait began
is known. A longer wait: the estimates are too short and have let work pile up since the first launch, by the
difference. A shorter one: they are too long, so whatever piled up had drained at each pause, and only what was queued
last was waited for, in proportion. BBR estimates a path's bandwidth in the same way.

Per program (`ProgramTimes`): short jobs come and go, and what is learned from one is used for the next. Function
handles differ from process to process, so a function is recognised by the shape of its grid.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.attribution.counters import FunctionLaunches
from agent.collectors.samples import Delivered
from agent.core.model import ProcessId

_KEPT_DELIVERIES = 24
_LOW_QUANTILE = 0.25
_ENOUGH_PACED = 5
_LARGEST_CUT = 0.3


def is_paced(delivery: Delivered) -> bool:
    """Whether the process was stopped in it, so that elapsed time says nothing about the work."""
    return delivery.pauses > 0 and delivery.charged_ns > 0


def delivered_ns(delivery: Delivered) -> float:
    """GPU time of the work in one delivery, if online requests that ran meanwhile used the whole device. ns; ≥ 0."""
    return bounds_ns(delivery)[0]


def bounds_ns(delivery: Delivered) -> tuple[float, float]:
    """Lower and upper bound: online requests used the device all of their time, or none of it. ns."""
    if not is_paced(delivery):
        return max(0.0, delivery.elapsed_ns - delivery.elapsed_busy_ns), max(0.0, delivery.elapsed_ns)
    run_before = max(0, delivery.elapsed_busy_ns - delivery.waited_busy_ns)  # the queue counts as not moving then
    least = _paced_ns(delivery, max(0, delivery.waited_ns - delivery.waited_busy_ns), delivery.queued_ns)
    return least, _paced_ns(delivery, delivery.waited_ns, max(0, delivery.queued_ns - run_before))


def _paced_ns(delivery: Delivered, waited_ns: int, queued_ns: int) -> float:
    if waited_ns < queued_ns:
        return delivery.charged_ns * max(_LARGEST_CUT, waited_ns / queued_ns)
    return delivery.charged_ns + waited_ns - queued_ns


@dataclass(slots=True)
class LaunchTimes:
    """Mean GPU time per launch of each process, from its last deliveries.

    Contention makes an unpaced delivery longer, never shorter, so a low quantile of those; a paced one is off to both
    sides, so the median of those, and only of them once there are enough. Beside online requests the device may have
    taken turns or not, so a delivery gives two bounds there, and moves the estimate only if that lies beyond them. The
    first estimate is the upper one: a process that seems to need less than it does would get more than was decided.
    """

    _recent: dict[ProcessId, deque[_Bounds]] = field(default_factory=dict)
    _delivered: dict[ProcessId, float] = field(default_factory=dict)  # by those, as of when it was last asked for
    _new: set[ProcessId] = field(default_factory=set)  # there have been deliveries since
    _assumed: dict[ProcessId, float] = field(default_factory=dict)

    def assume(self, launch_ns: Mapping[ProcessId, float]) -> None:
        """Estimates from elsewhere (NVML), ns per launch: used until the process's first delivery."""
        self._assumed.update(launch_ns)

    def observe(self, delivery: Delivered, own_ratio: float = 1.0) -> None:
        """Takes one delivery in. `own_ratio`: the part of a paced wait that the device spent on the process's own work.

        The rest of it went to other paced processes, which have work queued on the device at the same time.
        """
        if delivery.launches <= 0:
            return
        if own_ratio < 1 and is_paced(delivery):
            waited_ns, busy_ns = int(delivery.waited_ns * own_ratio), int(delivery.waited_busy_ns * own_ratio)
            delivery = delivery._replace(waited_ns=waited_ns, waited_busy_ns=busy_ns)
        least, most = (ns / delivery.launches for ns in bounds_ns(delivery))
        recent = self._recent.setdefault(delivery.process, deque(maxlen=_KEPT_DELIVERIES))
        recent.append((is_paced(delivery), least, most))
        self._new.add(delivery.process)

    def processes(self) -> frozenset[ProcessId]:
        """The processes of which anything is kept."""
        return frozenset(self._recent.keys() | self._assumed.keys())

    def per_launch_ns(self, process: ProcessId) -> float | None:
        """None before the first delivery, unless an estimate was assumed."""
        delivered = self._delivered.get(process)
        if process in self._new:
            self._new.discard(process)
            delivered = self._delivered[process] = _estimate_ns(self._recent[process], delivered)
        return self._assumed.get(process) if delivered is None else delivered

    def forget(self, process: ProcessId) -> None:
        """Drops a process that is gone."""
        self._recent.pop(process, None)
        self._delivered.pop(process, None)
        self._new.discard(process)
        self._assumed.pop(process, None)


_Bounds = tuple[bool, float, float]  # whether the process was paced; ns per launch, the least and the most


def _estimate_ns(recent: Collection[_Bounds], known: float | None) -> float:
    """ns per launch. `known`: the estimate so far."""
    paced = [one for one in recent if one[0]]
    if len(paced) >= _ENOUGH_PACED:
        return median_of_bounds([(least, most) for _, least, most in paced], known)
    usable = [one for one in recent if not one[0]] or paced
    if known is None:
        values = sorted([most for _, _, most in usable])
    else:
        values = sorted([most if most < known else max(least, known) for _, least, most in usable])
    return values[int(len(values) * _LOW_QUANTILE)]


def median_of_bounds(bounds: Sequence[tuple[float, float]], known: float | None) -> float:
    """The value with the least sum of distances to all (least, most); of several that next to `known`, or the highest.

    Bounds that hold the value say nothing about it, however many they are.
    """
    least, most = sorted([low for low, _ in bounds]), sorted([high for _, high in bounds])
    ends, count = sorted(least + most), len(bounds)
    lowest = next(x for x in ends if bisect_right(most, x) >= count - bisect_right(least, x))
    highest = next(x for x in reversed(ends) if bisect_left(most, x) <= count - bisect_left(least, x))
    return highest if known is None else min(highest, max(lowest, known))


Owner = ProcessId | str  # a process, or all those that run a program
Functions = Sequence[tuple[int, int]]  # (function, launches)
OTHER = 0  # any function that a delivery does not list
_DOWN, _UP = 0.3, 0.08
_MEMORY = 0.995  # weight of a delivery against the next one
_FIRST = 8  # deliveries that move the durations both ways alike
_KEPT = 32
_MOST_FUNCTIONS = 512  # of one process; more share OTHER


@dataclass(slots=True)
class OwnerTimes:
    """One owner: ns per launch by function, and measured ÷ predicted time of the last deliveries."""

    per_launch: dict[int, float] = field(default_factory=dict)
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    deliveries: int = 0
    elapsed_ns: float = 0.0  # of the last deliveries …
    waited: float = 0.0  # … of which it waited
    launches: float = 0.0
    weight: float = 0.0  # of these deliveries
    _spread: float | None = None  # since the last delivery

    def observe(self, delivery: Delivered, functions: Functions, measured_ns: float, up: float) -> None:
        """Takes one delivery in. `functions`: those that were launched in it."""
        counts = self._counts(functions, delivery.launches)
        durations = self.per_launch
        predicted = self._predicted(counts, measured_ns)
        self.ratios.append(measured_ns / predicted if predicted > 0 else 1.0)
        self._spread = None
        self.deliveries += 1
        self.elapsed_ns = self.elapsed_ns * _MEMORY + delivery.elapsed_ns
        self.waited = self.waited * _MEMORY + min(delivery.waited_ns, delivery.elapsed_ns)
        self.launches = self.launches * _MEMORY + delivery.launches
        self.weight = self.weight * _MEMORY + 1.0
        rate = _DOWN if measured_ns < predicted or self.deliveries <= _FIRST else up
        step = rate * (measured_ns - predicted) / sum([n * n for n in counts.values()])
        for function, n in counts.items():
            durations[function] = max(0.0, durations[function] + step * n)

    def _counts(self, functions: Functions, launches: int) -> dict[int, int]:
        """Launches by function, where those that there is no room for share OTHER."""
        counts: dict[int, int] = {}
        for function, count in functions:
            known = function in self.per_launch or len(self.per_launch) < _MOST_FUNCTIONS
            key = function if known else OTHER
            counts[key] = counts.get(key, 0) + count
            launches -= count
        if launches > 0:
            counts[OTHER] = counts.get(OTHER, 0) + launches
        return counts

    def _predicted(self, counts: Mapping[int, int], measured_ns: float) -> float:
        """Time by the durations so far; new functions begin with an equal share of what is left over."""
        durations = self.per_launch
        if new := counts.keys() - durations.keys():
            rest = measured_ns - sum(durations[f] * n for f, n in counts.items() if f not in new)
            durations.update(dict.fromkeys(new, max(0.0, rest) / sum(counts[f] for f in new)))
        return sum([durations[f] * n for f, n in counts.items()])

    def per_launch_ns(self, function: int) -> float:
        """The owner's mean for a function that was in no delivery."""
        known = self.per_launch.get(function)
        if known is None:
            known = self.per_launch.get(OTHER)
        return known if known is not None else sum(self.per_launch.values()) / len(self.per_launch)

    @property
    def waited_ns(self) -> float:
        """Mean time from launch to drained wait, per launch, including what other processes did meanwhile."""
        return self.elapsed_ns / self.launches

    @property
    def launches_between_waits(self) -> float:
        """The mean of its deliveries."""
        return self.launches / self.weight

    @property
    def waited_ratio(self) -> float:
        """The part of its deliveries in which it waited: in the rest, the device may have had nothing to do."""
        return self.waited / self.elapsed_ns if self.elapsed_ns else 1.0

    @property
    def spread(self) -> float:
        """Their uncertainty: half of the interquartile range of measured ÷ predicted."""
        if self._spread is None:
            ordered = sorted(self.ratios)
            quarter = len(ordered) // 4
            self._spread = (ordered[-1 - quarter] - ordered[quarter]) / 2
        return self._spread


@dataclass(slots=True)
class FunctionTimes:
    """See the module. Durations are of a process alone on the device, with the SMs that it may use."""

    up: float = _UP
    _times: dict[Owner, OwnerTimes] = field(default_factory=dict)

    def observe(self, owner: Owner, delivery: Delivered, functions: Functions | None = None) -> None:
        """Takes one delivery in. `functions`: in place of those that it lists."""
        measured = delivered_ns(delivery)
        if not delivery.launches or measured <= 0:
            return
        times = self._times.get(owner)
        if times is None:
            times = self._times[owner] = OwnerTimes()
        times.observe(delivery, delivery.functions if functions is None else functions, measured, self.up)

    def of(self, owner: Owner) -> OwnerTimes | None:
        """None before the owner's first delivery."""
        return self._times.get(owner)

    def per_launch_ns(self, owner: Owner, function: int) -> float | None:
        """None before the owner's first delivery."""
        times = self._times.get(owner)
        return None if times is None else times.per_launch_ns(function)

    def forget(self, owners: Collection[Owner]) -> None:
        """Drops owners that are gone."""
        for owner in owners:
            self._times.pop(owner, None)


_PROGRAM_UP: Final = 0.015  # they are many: there is time to find the lower edge of all their deliveries
_MOST_PROGRAMS: Final = 256


def shape_of(one: FunctionLaunches) -> int:
    """The grid's shape as a function number; never OTHER."""
    return hash((one.blocks // max(1, one.launches), one.threads_per_block)) or -1


@dataclass(slots=True)
class ProgramTimes:
    """Durations by program, of one device. The program that was used longest ago is dropped first."""

    _times: FunctionTimes = field(default_factory=lambda: FunctionTimes(_PROGRAM_UP))
    _used: dict[str, None] = field(default_factory=dict)

    def observe(
        self,
        deliveries: Mapping[ProcessId, Sequence[Delivered]],
        programs: Mapping[ProcessId, str],
        work: Mapping[ProcessId, Mapping[int, FunctionLaunches]],
    ) -> None:
        """Takes the deliveries of a tick in. `work`: what was launched in it."""
        for process, program in programs.items():
            launched, mine = work.get(process), deliveries.get(process)
            if not launched or not mine:
                continue
            self._used.pop(program, None)
            self._used[program] = None
            shapes = {function: shape_of(one) for function, one in launched.items()}
            for delivery in mine:
                functions = [(shapes.get(function, OTHER), count) for function, count in delivery.functions]
                self._times.observe(program, delivery, functions)
        while len(self._used) > _MOST_PROGRAMS:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._times.forget([oldest])

    def of(self, program: str | None) -> OwnerTimes | None:
        """By shape_of() in place of the function; None before the program's first delivery."""
        return None if program is None else self._times.of(program)
