# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Per container its role, latency, share, and how long it was stopped: what the snapshot says of enforcement."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, EnforcementStatus, PeriodicStatus, ProcessId
from agent.probes.abi import ProcessKey
from agent.probes.libbpf import Map
from enforce.actuators.ladder import NOWHERE, EscalationStatus
from enforce.controller.decision import DecisionInputs, Decisions, shortest_deadlines_ns
from enforce.controller.inputs import Counters
from enforce.memory.accounts import MemoryStatus
from enforce.model import Reading, Share
from enforce.policy.model import OfflineRule, OnlineRule, Slo
from enforce.signals.latency_window import Counted
from enforce.workloads import Workload, processes_of

_WINDOW_NS = NS_PER_SECOND
Devices = frozenset[DeviceUuid]
_SWEEP_READINGS = 300  # half a minute


@dataclass(frozen=True, slots=True)
class Paused:
    """A container's stops: number and seconds so far, share of the last second, and stops that another process ended.

    Time is the mean over its processes: eight of them, each stopped a tenth of the time, are stopped for a tenth.
    """

    pauses: int
    seconds: float
    ratio: float | None
    foreign: int = 0


class PauseMeter:
    """Sums what the kernel and the guardian wrote per process; the part of a dead process stays in its container's sum.

    The time for which processes were stopped between two readings is divided by their number at the second one. No sum
    ever decreases, whatever happens to a process's record.
    """

    def __init__(self, paces: Map, resumes: Map) -> None:
        self._paces, self._resumes = paces, resumes
        self.counters: dict[ProcessId, Counters] = {}  # of processes that were charged, at the last reading
        self._last: dict[ProcessId, tuple[int, int, int]] = {}
        self._sums: dict[ContainerKey, tuple[int, float, int]] = {}
        self._history: dict[ContainerKey, list[tuple[int, float]]] = {}
        self._readings = 0

    def foreign(self) -> dict[ContainerKey, int]:
        """Stops that other processes ended so far, as of the last reading."""
        return {key: foreign for key, (_, _, foreign) in self._sums.items()}

    def read(self, workloads: Mapping[ContainerKey, Workload], now_ns: int) -> dict[ContainerKey, Paused]:
        """Takes one reading of all processes."""
        self._sums = {key: sums for key, sums in self._sums.items() if key in workloads}
        self._history = {key: points for key, points in self._history.items() if key in workloads}
        alive = {process for workload in workloads.values() for process in processes_of(workload)}
        self.counters = {}
        for process in [process for process in self._last if process not in alive]:
            del self._last[process]
            self._paces.delete(ProcessKey.of(process))
            self._resumes.delete(ProcessKey.of(process))
        self._readings += 1
        if self._readings % _SWEEP_READINGS == 0:
            self._sweep(alive)
        return {key: self._container(key, workload, now_ns) for key, workload in workloads.items()}

    def _sweep(self, alive: Collection[ProcessId]) -> None:
        """Deletes records made after their process was forgotten: a launch of a descendant was charged to it.

        A process that is charged again gets a new record.
        """
        for records in (self._paces, self._resumes):
            for key in [key for key, _ in records.items() if key.id() not in alive]:
                records.delete(key)

    def _container(self, key: ContainerKey, workload: Workload, now_ns: int) -> Paused:
        pauses, paused_ns, foreign = self._sums.get(key, (0, 0.0, 0))
        processes = processes_of(workload)
        for process in processes:
            before = self._last.get(process, (0, 0, 0))
            now = self._last[process] = self._process(process, now_ns)
            more = [max(0, after - earlier) for earlier, after in zip(before, now, strict=True)]
            pauses, paused_ns, foreign = pauses + more[0], paused_ns + more[1] / len(processes), foreign + more[2]
        self._sums[key] = (pauses, paused_ns, foreign)
        history = self._history.setdefault(key, [])
        history.append((now_ns, paused_ns))
        while len(history) > 2 and history[1][0] <= now_ns - _WINDOW_NS:
            history.pop(0)
        elapsed = now_ns - history[0][0]
        ratio = min(1.0, (paused_ns - history[0][1]) / elapsed) if elapsed > 0 else None
        return Paused(pauses, paused_ns / NS_PER_SECOND, ratio, foreign)

    def _process(self, process: ProcessId, now_ns: int) -> tuple[int, int, int]:
        """Stops and stopped ns so far, the present stop included, and how many of them another process ended."""
        key = ProcessKey.of(process)
        pace, resume = self._paces.get(key), self._resumes.get(key)
        if pace is not None:
            self.counters[process] = Counters(pace.charged_ns, pace.pauses)
        pauses = pace.pauses if pace else 0
        foreign = pace.foreign if pace else 0
        if resume is None:
            return (pauses, 0, foreign)
        going_on = max(0, now_ns - resume.stopped_at_ns) if resume.stopped_at_ns else 0
        return (pauses, resume.paused_ns + going_on, foreign)


@dataclass(frozen=True, slots=True)
class ContainerFigures:
    """What is measured and done per container, beside its share. A container that is missing has none of it."""

    paused: Mapping[ContainerKey, Paused]
    escalation: Mapping[ContainerKey, EscalationStatus] = field(default_factory=dict)
    memory: Mapping[ContainerKey, MemoryStatus] = field(default_factory=dict)
    requests: Mapping[ContainerKey, Counted | None] = field(default_factory=dict)
    launch_seconds: Mapping[ContainerKey, float] = field(default_factory=dict)
    periodic: Mapping[ContainerKey, PeriodicStatus] = field(default_factory=dict)
    deadlines: Mapping[ContainerKey, str] = field(default_factory=dict)  # the same in words


def launch_seconds(inputs: DecisionInputs) -> dict[ContainerKey, float]:
    """GPU time of one launch: the mean of a container's processes, of those whose estimate is known."""
    known = {
        key: [inputs.launch_ns[process] for process in processes_of(workload) if process in inputs.launch_ns]
        for key, workload in inputs.workloads.items()
    }
    return {key: sum(times) / len(times) / NS_PER_SECOND for key, times in known.items() if times}


def statuses(
    inputs: DecisionInputs, decisions: Decisions, figures: ContainerFigures
) -> dict[ContainerKey, EnforcementStatus]:
    """One entry per container on a GPU."""
    shares = {one.workload.container.key: one.share for one in decisions.shares}
    beside = frozenset(shortest_deadlines_ns(inputs))
    return {
        key: _status(workload, inputs, shares.get(key), figures, beside) for key, workload in inputs.workloads.items()
    }


def _status(
    workload: Workload, inputs: DecisionInputs, share: Share | None, figures: ContainerFigures, periodic: Devices
) -> EnforcementStatus:
    key, rule = workload.container.key, workload.classification.rule
    reading = inputs.readings.get(key)
    slo = rule.slo if isinstance(rule, OnlineRule) else None
    also = slo.also if slo else None
    latency_ns, also_ns = _latency_ns(reading), _latency_ns(reading.also if reading else None)
    offline = isinstance(rule, OfflineRule)
    paused, memory, requests = figures.paused[key], figures.memory.get(key), figures.requests.get(key)
    escalation = figures.escalation.get(key, NOWHERE)
    return EnforcementStatus(
        role=workload.classification.role.value,
        rule=rule.name if rule else None,
        latency_seconds=latency_ns / NS_PER_SECOND if latency_ns is not None else None,
        latency_quantile=slo.quantile if slo else None,
        target_seconds=slo.target_ns / NS_PER_SECOND if slo else None,
        also_latency_seconds=also_ns / NS_PER_SECOND if also and also_ns is not None else None,
        also_quantile=also.quantile if also else None,
        also_target_seconds=also.target_ns / NS_PER_SECOND if also else None,
        launch_gpu_seconds=figures.launch_seconds.get(key) if offline else None,
        slack_ratio=_least_slack((slo, latency_ns), (also, also_ns)),
        requests_total=requests.requests if requests else None,
        slow_requests_total=requests.slow if requests else None,
        http=requests.details if requests else {},
        share_ratio=share.ratio if share else (1.0 if offline else None),
        paused_ratio=paused.ratio if offline else None,
        pauses_total=paused.pauses,
        paused_seconds_total=paused.seconds,
        foreign_resumes_total=paused.foreign,
        reason=figures.deadlines.get(key) or _reason(workload, share, periodic),
        periodic=figures.periodic.get(key),
        memory_quota_bytes=memory.quota_bytes if memory else None,
        allocations_denied_total=memory.denied if memory else 0,
        allocations_held_total=memory.held if memory else 0,
        rungs=escalation.rungs,
        troubles=escalation.troubles,
    )


def _latency_ns(reading: Reading | None) -> float | None:
    return (reading.latency_ns or reading.recent_ns) if reading else None


def _least_slack(*read: tuple[Slo | None, float | None]) -> float | None:
    known = [slo.slack_ratio(latency_ns) for slo, latency_ns in read if slo and latency_ns is not None]
    return min(known, default=None)


def _reason(workload: Workload, share: Share | None, periodic: Devices) -> str | None:
    classification = workload.classification
    if classification.misconfigured:
        return classification.reason
    if share is not None and share.reason:
        return share.reason
    if not isinstance(classification.rule, OfflineRule):
        return None
    if workload.devices & periodic:
        return "gives way to the requests of periodic containers"
    return "no online container on its GPUs"
