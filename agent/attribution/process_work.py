# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process seems to have done on one device in a tick, by its own waits and by NVML's share of time.

A process that NVML has not reported yet is taken together with others that run the same program: short jobs come and
go, and what is learned from one is used for the next.

NVML's share of time is exact for a process that is alone on the device. Where several take turns it is a poll: each of
five samples a second has the device's utilisation, and credits all of it to one of them (seen on an H200 with driver
580.159.04: docs/on-a-real-gpu.md). So it is a binomial sample of each one's part, without bias, and as uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from agent.attribution.contention import SmDemand, sm_fraction
from agent.attribution.counters import FunctionLaunches
from agent.attribution.durations import Owner, OwnerTimes, shape_of
from agent.collectors.samples import Delivered
from agent.core.clock import NS_PER_SECOND
from agent.core.model import ProcessId

NINETY_PERCENT = 1.645  # standard deviations of a normal distribution
UNIT_NS = 10_000.0  # scales the unknown durations to the order of 1
_POLL_MEMORY = 0.95
_DRIFT = 0.03  # of the ratio of NVML's time to that by waits, from tick to tick
_LEAST_WAITED = 0.1
_JUMP = 4.0  # standard deviations: another ratio from now on
_LEAST_BUSY = 0.01  # of a tick: NVML's resolution
_ENOUGH_BUSY = 2.0  # ticks
_EXACT = 0.05  # of NVML's time: its error, for that to count as exact
_POLLS_PER_SECOND = 5.0
_ENOUGH_POLLED = 3  # ticks
_ALONE_ERROR = 0.015  # of NVML's time of a process that is alone: it comes in per cent
_CLIENT_ERROR = 0.04  # of that of an MPS client, where NVML credits clients at all
_LEAST_FIGURE_SIGMA = 1e-6
Unit = tuple[Owner, int]  # an owner's factor (function 0), or the duration of one of its functions


@dataclass(frozen=True, slots=True)
class TickWork:
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
    deliveries: Mapping[ProcessId, Sequence[Delivered]] = field(default_factory=dict)  # of any process


class Figure(NamedTuple):
    """A value and its standard deviation."""

    value: float
    sigma: float

    def combined(self, other: Figure) -> Figure:
        """By the inverses of their variances."""
        own, others = max(self.sigma, _LEAST_FIGURE_SIGMA) ** -2, max(other.sigma, _LEAST_FIGURE_SIGMA) ** -2
        return Figure((self.value * own + other.value * others) / (own + others), (own + others) ** -0.5)


_UNSEEN_GRIDS = Figure(0.5, 0.29)  # share of the SMs that grids keep busy of which nothing is known: any


class Turns(NamedTuple):
    """Those that take turns on a device: how many worked, how many NVML credits with time, and with how much."""

    workers: int
    credited: int
    credited_ns: float

    @classmethod
    def of(cls, tick: TickWork) -> Turns:
        """All but MPS clients."""
        credited = [ns for process, ns in tick.busy_ns.items() if ns and process not in tick.side_by_side]
        return cls(sum(process not in tick.side_by_side for process in tick.work), len(credited), sum(credited))


class NvmlTick(NamedTuple):
    """NVML's time of one process in a tick, and of all on the device; `is_poll`: several took turns."""

    own_ns: float
    all_ns: float
    interval_ns: float
    is_poll: bool
    is_client: bool = False


def _polls(interval_ns: float) -> float:
    return max(1.0, _POLLS_PER_SECOND * interval_ns / NS_PER_SECOND)


def _poll_variance(own: float, of: float, all_: float, interval_ns: float) -> float:
    """Of a tick's polls, which credit `all_` to any process, where `own` of `of` is what they credited to this one.

    Its part is estimated by the rule of succession, which is never 0 or 1.
    """
    polls = _polls(interval_ns)
    one = all_ / polls
    part = (own + one) / (of + 2 * one)
    return all_**2 * part * (1 - part) / polls


def poll_error(own: float, all_: float, interval_ns: float) -> float:
    """Within which the true time is in nine of ten ticks, of a process that nothing but polls are known of."""
    return NINETY_PERCENT * math.sqrt(_poll_variance(own, all_, all_, interval_ns)) if all_ else 0.0


@dataclass(slots=True)
class NvmlTime:
    """NVML's time of a process ÷ its time by waits, or, where it never waits, its launches: a Kalman filter's state.

    What came before counts as much as it was exact: polls do not undo what was seen while the process was alone.
    """

    by_waits: bool = False
    value: float = 0.0  # ns per ns, or per launch
    variance: float = math.inf
    ticks: float = 0.0
    last_ns: float = 0.0
    polled_ns: float = 0.0  # what the last polls credited to it …
    polled_all_ns: float = 0.0  # … and to any process

    def observe(self, predicted_ns: float, launches: float, now: NvmlTick | None) -> None:
        """Adds a tick, unless NVML has no sample of it, which happens now and then."""
        if now is None or not launches:
            return
        if self.by_waits != (predicted_ns > 0):
            self.by_waits, self.variance, self.ticks = predicted_ns > 0, math.inf, 0.0
        amount = predicted_ns if self.by_waits else launches
        seen, noise = now.own_ns / amount, self._variance(now) / amount**2
        self.last_ns = now.own_ns
        before = self.variance + (_DRIFT * self.value) ** 2
        if (seen - self.value) ** 2 > _JUMP**2 * (before + noise):
            before = math.inf
        gain = 1.0 if math.isinf(before) else before / (before + noise)
        self.value += gain * (seen - self.value)
        self.variance = noise if math.isinf(before) else (1 - gain) * before
        self.ticks += 1

    def _variance(self, now: NvmlTick) -> float:
        """Of a tick."""
        error = (_CLIENT_ERROR if now.is_client else _ALONE_ERROR) * max(now.own_ns, _LEAST_BUSY * now.interval_ns)
        late = (now.own_ns - self.last_ns) * min(1.0, NS_PER_SECOND / (_POLLS_PER_SECOND * now.interval_ns))
        if not now.is_poll or not now.all_ns:
            return error**2 + late**2  # a sample's window is not the tick's
        self.polled_ns = self.polled_ns * _POLL_MEMORY + now.own_ns
        self.polled_all_ns = self.polled_all_ns * _POLL_MEMORY + now.all_ns
        return _poll_variance(self.polled_ns, self.polled_all_ns, now.all_ns, now.interval_ns)

    @property
    def is_known(self) -> bool:
        """Whether there are enough samples: a single one is of another second than the launches beside it."""
        return self.ticks >= _ENOUGH_BUSY

    @property
    def sigma(self) -> float:
        """The standard deviation of the value."""
        return math.sqrt(self.variance)

    @property
    def is_exact(self) -> bool:
        """Whether it is known so well that nothing else need be asked."""
        return self.is_known and self.variance <= (_EXACT * self.value) ** 2

    def scale(self) -> Figure | None:
        """NVML's time ÷ the time by waits; None while one of them is not known."""
        return Figure(self.value, self.sigma) if self.is_known and self.by_waits else None

    def relative_sigma(self) -> float:
        """The standard deviation of NVML's time, of itself."""
        return self.sigma / self.value if self.is_known and self.value else math.inf

    def per_launch_ns(self) -> float | None:
        """For a process that never waits."""
        return self.value if self.is_known and not self.by_waits else None


class Unseen(NamedTuple):
    """NVML's time in a tick of processes whose launches are not seen, and of all on the device."""

    own_ns: Mapping[ProcessId, float] = MappingProxyType({})
    all_ns: float = 0.0


@dataclass(slots=True)
class PolledTime:
    """The same over the last ticks: each one is but a few polls."""

    own_ns: dict[ProcessId, float] = field(default_factory=dict)
    all_ns: float = 0.0
    interval_ns: float = 0.0
    ticks: int = 0

    def observe(self, now: Unseen, interval_ns: int) -> None:
        """Adds a tick."""
        self.ticks += 1
        before = {process: ns * _POLL_MEMORY for process, ns in self.own_ns.items() if process in now.own_ns}
        self.own_ns = {process: before.get(process, 0.0) + ns for process, ns in now.own_ns.items()}
        self.all_ns = self.all_ns * _POLL_MEMORY + now.all_ns
        self.interval_ns = self.interval_ns * _POLL_MEMORY + interval_ns

    def share(self, *, of_sms: bool) -> Figure | None:
        """What all of them had, of the device; None: NVML credits them with nothing, or they may just not be seen yet.

        `of_sms`: a share of the SMs is asked for, and NVML's is one of time; how large their grids are is not known.
        """
        own_ns = sum(self.own_ns.values())
        if not own_ns or self.ticks < _ENOUGH_POLLED:
            return None
        value = own_ns / self.interval_ns
        sigma = math.sqrt(_poll_variance(own_ns, self.all_ns, self.all_ns, self.interval_ns)) / self.interval_ns
        grids = _UNSEEN_GRIDS if of_sms else Figure(1.0, 0.0)
        return Figure(value * grids.value, math.hypot(sigma * grids.value, value * grids.sigma))

    def part(self, process: ProcessId) -> float:
        """What one of them had of that."""
        return self.own_ns[process] / sum(self.own_ns.values())


class ProcessWork(NamedTuple):
    """A process's tick: SM time by unit, ns, if the unit's factor is 1."""

    owner: Owner
    units: Mapping[Unit, float]
    time_ns: float = 0.0  # in which it had kernels running
    open_ns: float = 0.0  # in which it had work that it had not yet waited for
    kernels: int = 0
    graph_ratio: float = 0.0  # the part of graphs: only their kernels' mean grid is known
    by_nvml: bool = False  # the durations are NVML's mean, not those of waits
    burst_ns: float = 0.0  # SM time of what it launches between two waits

    def border_sigma_ns(self, interval_ns: int) -> float:
        """Standard deviation of what is launched in one tick and runs in the next, at both ends of a tick.

        At a random time it has open work with the chance p, of which anything up to a burst b has not run yet: a
        variance of p b²/3 − (p b/2)² at each end.
        """
        p = min(1.0, self.open_ns / interval_ns) if interval_ns else 0.0
        return self.burst_ns * math.sqrt(2 * (p / 3 - p * p / 4))

    @property
    def seemed_ns(self) -> float:
        """SM time of the functions that have a duration, before correction."""
        return self.units.get((self.owner, 0), 0.0)

    def demand(self, interval_ns: float, scale: float) -> SmDemand:
        """Its demand, as it competes with others. `scale`: of its durations."""
        fraction, time_ns = self.seemed_ns / self.time_ns, self.time_ns * scale
        return SmDemand(time_ns / interval_ns, fraction, time_ns / max(1, self.kernels))


class Durations(NamedTuple):
    """Durations of the functions of one process: by its own waits, and by those of all processes of its program."""

    own: OwnerTimes | None
    program: OwnerTimes | None

    def waits(self, *, with_program: bool) -> OwnerTimes | None:
        """Those of its program, or its own, if there are such, else the others."""
        return (self.program or self.own) if with_program else (self.own or self.program)

    def of(self, functions: Mapping[int, FunctionLaunches], *, with_program: bool) -> list[float] | None:
        """Of each function, by these; None: nothing is known."""
        times = self.waits(with_program=with_program)
        if times is None:
            return None
        shapes = times is self.program
        return [times.per_launch_ns(shape_of(one) if shapes else function) for function, one in functions.items()]


def work_of(tick: TickWork, process: ProcessId, known: Durations, nvml: NvmlTime, turns: Turns) -> ProcessWork:
    """Launches × durations × share of SMs that the grids keep busy. A process without durations has NVML's mean."""
    functions, rate = tick.work[process], tick.interval_ns / tick.counted_ns if tick.counted_ns else 1.0
    counts = [rate * one.launches for one in functions.values()]
    launches, own = sum(counts), None
    here = Durations(None, known.program) if process in tick.on_many_devices else known  # it waits for the slowest one
    if here.own and here.own.waited_ratio >= _LEAST_WAITED:  # else the device was done long before
        own = here.of(functions, with_program=False)
    predicted_ns = _dot(counts, own) if own else 0.0
    nvml.observe(predicted_ns, launches, _nvml_tick(tick, process, turns))
    owner = process if nvml.is_known else tick.programs.get(process, process)
    mean_ns = None if predicted_ns else nvml.per_launch_ns()
    # Its own, once NVML corrects them. Neighbours make nearly all waits of an MPS client longer: its program's times
    # keep nearer to the shortest ones.
    with_program = owner != process or process in tick.side_by_side
    waited = known.waits(with_program=with_program)
    open_ns = min(launches * waited.waited_ns, tick.interval_ns) if waited else tick.interval_ns
    durations = here.of(functions, with_program=with_program) if mean_ns is None else [mean_ns] * len(counts)
    limit, kernels = tick.sm_limits.get(process, 1.0), 0
    time_ns = seemed_ns = graph_ns = 0.0
    units: dict[Unit, float] = {}
    for at, (function, one) in enumerate(functions.items()):
        kernels += one.kernels
        busy = counts[at] * _fraction(tick, limit, one)
        if durations is None:
            unit = (owner, function if owner == process else shape_of(one))
            units[unit] = units.get(unit, 0.0) + busy * UNIT_NS
            continue
        time_ns += counts[at] * durations[at]
        seemed_ns += busy * durations[at]
        if one.kernels > one.launches:
            graph_ns += counts[at] * durations[at]
    if durations is not None:
        units[owner, 0] = seemed_ns
    graph_ratio = graph_ns / time_ns if time_ns else 0.0
    burst_ns = seemed_ns / launches * waited.launches_between_waits if waited else 0.0
    return ProcessWork(owner, units, time_ns, open_ns, kernels, graph_ratio, mean_ns is not None, burst_ns)


def _nvml_tick(tick: TickWork, process: ProcessId, turns: Turns) -> NvmlTick | None:
    """NVML's time of it; 0 where samples credited others alone. None: there is no sample."""
    if not tick.interval_ns:
        return None
    client = process in tick.side_by_side
    own_ns = tick.busy_ns.get(process)
    others = turns.credited - (not client and bool(own_ns))
    if own_ns is None:
        if client or not others:
            return None
        own_ns = 0.0
    takes_turns = not client and (others > 0 or turns.workers > 1)
    return NvmlTick(own_ns, turns.credited_ns, tick.interval_ns, takes_turns, client)


def _fraction(tick: TickWork, limit: float, one: FunctionLaunches) -> float:
    """Share of the device's SMs that a launch keeps busy while it runs. `limit`: what its process may use."""
    if not tick.is_share_of_sms:
        return 1.0
    if not one.blocks or not tick.sm_count:
        return limit
    if one.waves and limit >= 1:
        return min(1.0, one.wave_sms / (one.waves * tick.sm_count))
    usable = max(1, round(tick.sm_count * limit))
    blocks = one.blocks / max(1, one.kernels)
    return sm_fraction(blocks, one.threads_per_block, usable) * usable / tick.sm_count


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])
