# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Periodic containers: what requests take, whether all deadlines on a device can be met, and how many were missed.

On a device one request runs at a time, the earliest deadline first (bpf/turn.h), so what a request takes is how long it
has its turn. All deadlines are met if for each deadline D_k of a task there

    Σ C_i / min(D_i, T_i)  over the tasks with D_i ≤ D_k,  + B_k / D_k  ≤  1

with B_k the longest request of a task with a longer deadline, which may have begun a moment before, and the work that
offline processes may have queued then. (Baker, Stack-based scheduling of realtime processes, 1991; a request that runs
is a critical section of its whole length.) What offline processes get whatever runs is added: their floor, and a launch
after each longest pause. The left side is the load. It is sufficient: beyond 1 deadlines may be met all the same.
Nothing is refused because of it: it is reported.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, PeriodicStatus, ProcessId
from agent.core.text import printable
from agent.probes.abi import SERVED, Periodic, ProcessKey
from agent.probes.libbpf import Map
from enforce.controller.decision import DecisionInputs
from enforce.model import Level, Target
from enforce.policy.model import PeriodicRule, Role
from enforce.workloads import Workload, processes_of

_log = logging.getLogger(__name__)
_WINDOW_NS = 10 * NS_PER_SECOND
_MOST_TIMES = 2048  # of one process
_FEWEST_TIMES = 5  # fewer say nothing of the longest
_LEFT_OUT = 100  # of so many requests one is longer: the host's stalls are not the request's
_NOTABLE = 0.1  # change of a load that is logged


@dataclass(frozen=True, slots=True)
class Task:
    """A periodic process: what a request takes, the time within which it has to end, and how often one comes."""

    cost_ns: float
    deadline_ns: int
    period_ns: int


@dataclass(frozen=True, slots=True)
class OfflineWork:
    """What of it periodic requests meet: what is queued when one begins, and its part of the time whatever runs."""

    queued_ns: float = 0.0
    share_ratio: float = 0.0


def load_ratio(tasks: Sequence[Task], offline: OfflineWork = OfflineWork()) -> float:  # frozen
    """At most 1: every deadline on the device is met."""
    return max((_load_at(deadline_ns, tasks, offline) for deadline_ns in {t.deadline_ns for t in tasks}), default=0.0)


def _load_at(deadline_ns: int, tasks: Sequence[Task], offline: OfflineWork) -> float:
    within = (task for task in tasks if task.deadline_ns <= deadline_ns)
    longest_ns = max((task.cost_ns for task in tasks if task.deadline_ns > deadline_ns), default=0.0)
    demand = sum(task.cost_ns / min(task.deadline_ns, task.period_ns) for task in within)
    return demand + offline.share_ratio + (longest_ns + offline.queued_ns) / deadline_ns


@dataclass(frozen=True, slots=True)
class PeriodicRequests:
    """A container's requests so far, and what one takes, by process; one of which too few ended is absent."""

    ended: int = 0
    misses: int = 0
    worst_late_ns: int = 0
    cost_ns: Mapping[ProcessId, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Process:
    """What was read of one process so far. `times`: when it was read, and how long a request had its turn."""

    ended: int = 0
    misses: int = 0
    served: int = 0
    times: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))

    def observe(self, record: Periodic, now_ns: int) -> None:
        for number in range(max(self.served, record.served - SERVED), record.served):
            self.times.append((now_ns, record.served_ns[number % SERVED]))
        self.ended, self.misses, self.served = record.requests, record.misses, record.served

    def cost_ns(self, now_ns: int) -> float | None:
        """Of the longest requests of the last ten seconds; of few that are older, if there are no others."""
        while len(self.times) > _FEWEST_TIMES and now_ns - self.times[0][0] > _WINDOW_NS:
            self.times.popleft()
        if len(self.times) < _FEWEST_TIMES:
            return None
        lengths = sorted(length_ns for _, length_ns in self.times)
        return float(lengths[-1 - len(lengths) // _LEFT_OUT])


class RequestMeter:
    """Sums what the kernel counted per process; the part of a dead process stays in its container's sum."""

    def __init__(self, periodics: Map) -> None:
        self._periodics = periodics
        self._processes: dict[ProcessId, _Process] = {}
        self._sums: dict[ContainerKey, PeriodicRequests] = {}

    def read(self, workloads: Mapping[ContainerKey, Workload], now_ns: int) -> dict[ContainerKey, PeriodicRequests]:
        """Of the periodic ones among them. Once per decision."""
        periodic = {key: one for key, one in workloads.items() if one.classification.role is Role.PERIODIC}
        alive = {process for one in periodic.values() for process in processes_of(one)}
        for process in [process for process in self._processes if process not in alive]:
            del self._processes[process]
            self._periodics.delete(ProcessKey.of(process))
        self._sums = {key: self._container(key, one, now_ns) for key, one in periodic.items()}
        return self._sums

    def _container(self, key: ContainerKey, workload: Workload, now_ns: int) -> PeriodicRequests:
        sums = self._sums.get(key, PeriodicRequests())
        ended, misses, worst_late_ns, cost_ns = sums.ended, sums.misses, sums.worst_late_ns, dict[ProcessId, float]()
        for process in processes_of(workload):
            record: Periodic | None = self._periodics.get(ProcessKey.of(process))
            if record is None:
                continue
            known = self._processes.setdefault(process, _Process())
            ended += max(0, record.requests - known.ended)
            misses += max(0, record.misses - known.misses)
            worst_late_ns = max(worst_late_ns, record.worst_late_ns)
            known.observe(record, now_ns)
            if (longest_ns := known.cost_ns(now_ns)) is not None:
                cost_ns[process] = longest_ns
        return PeriodicRequests(ended, misses, worst_late_ns, cost_ns)


@dataclass(frozen=True, slots=True)
class Admission:
    """Of one device: its load, or why it is not known."""

    load_ratio: float | None
    obstacle: str = ""

    @property
    def text(self) -> str:
        """As a sentence for people."""
        if self.load_ratio is None:
            return f"whether deadlines can be met is unknown: {self.obstacle}"
        if self.load_ratio <= 1:
            return f"admitted: a load of {self.load_ratio:.2f} on its GPU, up to 1 every deadline is met"
        return f"not admitted: a load of {self.load_ratio:.2f} on its GPU, beyond 1 deadlines may be missed"


def admissions(
    inputs: DecisionInputs, levels: Mapping[Target, Level], requests: Mapping[ContainerKey, PeriodicRequests]
) -> dict[DeviceUuid, Admission]:
    """Of each device with a periodic container."""
    devices = {device for key in requests for device in inputs.workloads[key].devices}
    return {device: _admission(device, inputs, levels, requests) for device in sorted(devices)}


def _admission(
    device: DeviceUuid,
    inputs: DecisionInputs,
    levels: Mapping[Target, Level],
    requests: Mapping[ContainerKey, PeriodicRequests],
) -> Admission:
    tasks: list[Task] = []
    for workload in (one for one in inputs.workloads.values() if device in one.devices):
        rule, name = workload.classification.rule, printable(workload.container.name, 160)
        if workload.classification.role is Role.ONLINE:
            return Admission(None, f"{name}, which is online, is on the GPU too and waits for no turn")
        if isinstance(rule, PeriodicRule):
            costs = requests[workload.container.key].cost_ns
            if len(costs) < len(workload.members):
                return Admission(None, f"too few requests of {name} have ended")
            tasks += [Task(cost_ns, rule.deadline_ns, rule.period_ns) for cost_ns in costs.values()]
        elif workload.classification.role is Role.OFFLINE and not _is_gated(workload, levels):
            return Admission(None, f"{name}, which is offline, is on the GPU too and stops at no gate")
    return Admission(load_ratio(tasks, _offline_work(device, inputs, levels)))


def _levels_of(workload: Workload, levels: Mapping[Target, Level]) -> list[Level]:
    return [level for target, level in levels.items() if target.container == workload.container.key]


def _is_gated(workload: Workload, levels: Mapping[Target, Level]) -> bool:
    found = _levels_of(workload, levels)
    return bool(found) and all(level.gate and level.pace for level in found)


def _offline_work(device: DeviceUuid, inputs: DecisionInputs, levels: Mapping[Target, Level]) -> OfflineWork:
    """Of all processes on the device: a launch may be longer than a queue, and is let through after a longest pause."""
    offline = [one for one in inputs.workloads.values() if one.classification.role is Role.OFFLINE]
    there = [level for one in offline if device in one.devices for level in _levels_of(one, levels)]
    return OfflineWork(
        float(sum(max(level.max_queued_ns, level.launch_ns) for level in there)),
        sum(level.floor_ratio + level.launch_ns / max(1, level.max_pause_ns) for level in there),
    )


class DeadlineMonitor:
    """What is reported of periodic containers. For the deciding thread."""

    def __init__(self, periodics: Map, enforced: bool) -> None:
        self._meter, self._enforced = RequestMeter(periodics), enforced
        self._logged: dict[DeviceUuid, Admission] = {}
        self.texts: dict[ContainerKey, str] = {}  # the statuses in words, for people

    def step(
        self, inputs: DecisionInputs, levels: Mapping[Target, Level], now_ns: int
    ) -> dict[ContainerKey, PeriodicStatus]:
        """The status of each periodic container. Once per decision."""
        requests = self._meter.read(inputs.workloads, now_ns)
        by_device = admissions(inputs, levels, requests)
        self._log(by_device)
        found, self.texts = {}, {}
        for key, counted in requests.items():
            workload = inputs.workloads[key]
            admission = _worst([by_device[device] for device in workload.devices])
            status = self._status(workload, counted, admission)
            if status is not None:
                found[key], self.texts[key] = status, _text(status, admission)
        return found

    def _status(self, workload: Workload, counted: PeriodicRequests, admission: Admission) -> PeriodicStatus | None:
        rule = workload.classification.rule
        if not isinstance(rule, PeriodicRule):
            return None
        longest_ns = max(counted.cost_ns.values(), default=None)
        return PeriodicStatus(
            period_seconds=rule.period_ns / NS_PER_SECOND,
            deadline_seconds=rule.deadline_ns / NS_PER_SECOND,
            requests_total=counted.ended if self._enforced else None,
            misses_total=counted.misses if self._enforced else None,
            worst_lateness_seconds=counted.worst_late_ns / NS_PER_SECOND if self._enforced else None,
            request_gpu_seconds=None if longest_ns is None else longest_ns / NS_PER_SECOND,
            load_ratio=admission.load_ratio,
        )

    def _log(self, by_device: Mapping[DeviceUuid, Admission]) -> None:
        for device, now in by_device.items():
            if _is_news(self._logged.get(device), now):
                self._logged[device] = now
                say = _log.warning if now.load_ratio is not None and now.load_ratio > 1 else _log.info
                say("periodic containers on %s: %s", device, now.text)
        self._logged = {device: one for device, one in self._logged.items() if device in by_device}


def _worst(found: Iterable[Admission]) -> Admission:
    """Unknown before the highest load."""
    return max(found, key=lambda one: float("inf") if one.load_ratio is None else one.load_ratio, default=_NOWHERE)


_NOWHERE = Admission(None, "no GPU of it is known")


def _is_news(before: Admission | None, now: Admission) -> bool:
    if before is None or before.load_ratio is None or now.load_ratio is None:
        return before != now
    crossed = (before.load_ratio > 1) != (now.load_ratio > 1)
    return crossed or abs(now.load_ratio - before.load_ratio) > _NOTABLE * before.load_ratio


def _text(status: PeriodicStatus, admission: Admission) -> str:
    within = f"each request within {status.deadline_seconds * 1e3:g} ms, one every {status.period_seconds * 1e3:g} ms"
    if not status.requests_total:
        return f"{within}; {admission.text}"
    missed = f"{status.misses_total} of {status.requests_total} were late"
    if status.misses_total and status.worst_lateness_seconds is not None:
        missed += f", by up to {status.worst_lateness_seconds * 1e3:.3g} ms"
    return f"{within}; {missed}; {admission.text}"
