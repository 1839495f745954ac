# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Per container its role, latency, share, and how long it was stopped: what the snapshot says of enforcement."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceReading, DeviceUuid, EnforcementStatus, PeriodicStatus, ProcessId
from agent.probes.abi import Pace, ProcessKey, Resume
from agent.probes.libbpf import Map
from enforce.actuators.ladder import NOWHERE, EscalationStatus
from enforce.actuators.launch.pace import link_speed
from enforce.controller.decision import DecisionInputs, Decisions, shortest_deadlines_ns
from enforce.controller.inputs import Counters
from enforce.memory.accounts import MemoryStatus
from enforce.model import Share, slack_ratio
from enforce.policy.model import OfflineRule, OnlineRule, Pcie
from enforce.policy.quantities import copy_bound
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
    copy_pauses: int = 0  # of the stops: at copies between host and device
    copy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stops:
    """Sums of one process, or of a container."""

    pauses: int = 0
    paused_ns: float = 0.0
    foreign: int = 0
    copy_pauses: int = 0
    copy_paused_ns: float = 0.0

    def plus(self, before: _Stops, now: _Stops, processes: int) -> _Stops:
        """With what came between two readings of one of so many processes; what became less counts for nothing."""
        return _Stops(
            self.pauses + max(0, now.pauses - before.pauses),
            self.paused_ns + max(0.0, now.paused_ns - before.paused_ns) / processes,
            self.foreign + max(0, now.foreign - before.foreign),
            self.copy_pauses + max(0, now.copy_pauses - before.copy_pauses),
            self.copy_paused_ns + max(0.0, now.copy_paused_ns - before.copy_paused_ns) / processes,
        )


_NO_STOPS = _Stops()


class _Records(NamedTuple):
    """What the kernel and the guardian wrote of each process, by its key's bytes."""

    paces: Mapping[bytes, Pace]
    resumes: Mapping[bytes, Resume]


class PauseMeter:
    """Sums what the kernel and the guardian wrote per process; the part of a dead process stays in its container's sum.

    The time for which processes were stopped between two readings is divided by their number at the second one. No sum
    ever decreases, whatever happens to a process's record.
    """

    def __init__(self, paces: Map, resumes: Map) -> None:
        self._paces, self._resumes = paces, resumes
        self.counters: dict[ProcessId, Counters] = {}  # of processes that were charged, at the last reading
        self._last: dict[ProcessId, _Stops] = {}
        self._sums: dict[ContainerKey, _Stops] = {}
        self._history: dict[ContainerKey, list[tuple[int, float]]] = {}
        self._readings = 0

    def foreign(self) -> dict[ContainerKey, int]:
        """Stops that other processes ended so far, as of the last reading."""
        return {key: sums.foreign for key, sums in self._sums.items()}

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
        keys = [ProcessKey.of(process) for process in alive]
        records = _Records(self._paces.get_all(keys), self._resumes.get_all(keys))
        return {key: self._container(key, workload, records, now_ns) for key, workload in workloads.items()}

    def _sweep(self, alive: Collection[ProcessId]) -> None:
        """Deletes records made after their process was forgotten: a launch of a descendant was charged to it.

        A process that is charged again gets a new record.
        """
        for records in (self._paces, self._resumes):
            for key in [key for key, _ in records.items() if key.id() not in alive]:
                records.delete(key)

    def _container(self, key: ContainerKey, workload: Workload, records: _Records, now_ns: int) -> Paused:
        sums = self._sums.get(key, _NO_STOPS)
        processes = processes_of(workload)
        for process in processes:
            before = self._last.get(process, _NO_STOPS)
            now = self._last[process] = self._process(process, records, now_ns)
            sums = sums.plus(before, now, len(processes))
        self._sums[key] = sums
        history = self._history.setdefault(key, [])
        history.append((now_ns, sums.paused_ns))
        while len(history) > 2 and history[1][0] <= now_ns - _WINDOW_NS:
            history.pop(0)
        elapsed = now_ns - history[0][0]
        ratio = min(1.0, (sums.paused_ns - history[0][1]) / elapsed) if elapsed > 0 else None
        seconds, copy_seconds = sums.paused_ns / NS_PER_SECOND, sums.copy_paused_ns / NS_PER_SECOND
        return Paused(sums.pauses, seconds, ratio, sums.foreign, sums.copy_pauses, copy_seconds)

    def _process(self, process: ProcessId, records: _Records, now_ns: int) -> _Stops:
        """So far; the present stop is in `paused_ns`, and among those at copies once it is over."""
        key = bytes(ProcessKey.of(process))
        pace, resume = records.paces.get(key), records.resumes.get(key)
        if pace is not None:
            self.counters[process] = Counters(pace.charged_ns, pace.pauses - pace.copy_pauses)
        pauses, foreign, copy_pauses = (pace.pauses, pace.foreign, pace.copy_pauses) if pace else (0, 0, 0)
        if resume is None:
            return _Stops(pauses, 0, foreign, copy_pauses)
        going_on = max(0, now_ns - resume.stopped_at_ns) if resume.stopped_at_ns else 0
        return _Stops(pauses, resume.paused_ns + going_on, foreign, copy_pauses, resume.copy_paused_ns)


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


def described_copies(inputs: DecisionInputs, pcie: Pcie, devices: Iterable[DeviceReading]) -> dict[ContainerKey, str]:
    """How the copies of each container are paced, as a sentence."""
    speeds = {one.device.uuid: link_speed(pcie, one.device) for one in devices}
    return {key: _described_copies(inputs.workloads[key], speeds) for key in inputs.copy_groups}


def _described_copies(workload: Workload, speeds: Mapping[DeviceUuid, int | None]) -> str:
    rule = workload.classification.rule
    weight = rule.weight if isinstance(rule, OfflineRule) else 1.0
    known = [speed for device in workload.devices if (speed := speeds.get(device)) is not None]
    if not known:
        return "its copies are not paced, as NVML does not say how fast its GPUs' links are: write pcie.bandwidth"
    return f"copies paced with weight {weight:g}: {copy_bound(min(known))}"


def statuses(
    inputs: DecisionInputs, decisions: Decisions, figures: ContainerFigures
) -> dict[ContainerKey, EnforcementStatus]:
    """One entry per container on a GPU."""
    shares = {one.workload.container.key: one.share for one in decisions.shares}
    beside = frozenset(shortest_deadlines_ns(inputs))
    found = {}
    for key, workload in inputs.workloads.items():
        share = shares.get(key)
        reason = figures.deadlines.get(key) or _reason(workload, share, beside, decisions.copies.get(key))
        found[key] = _status(workload, inputs, share, figures, reason)
    return found


def _status(
    workload: Workload, inputs: DecisionInputs, share: Share | None, figures: ContainerFigures, reason: str | None
) -> EnforcementStatus:
    key, rule = workload.container.key, workload.classification.rule
    reading = inputs.readings.get(key)
    slo = rule.slo if isinstance(rule, OnlineRule) else None
    also = slo.also if slo else None
    latency_ns, also_ns = (one.of_window_ns if one else None for one in (reading, reading.also if reading else None))
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
        slack_ratio=slack_ratio(reading, slo, of_window=True) if slo else None,
        requests_total=requests.requests if requests else None,
        slow_requests_total=requests.slow if requests else None,
        http=requests.details if requests else {},
        share_ratio=share.ratio if share else (1.0 if offline else None),
        paused_ratio=paused.ratio if offline else None,
        pauses_total=paused.pauses,
        paused_seconds_total=paused.seconds,
        copy_pauses_total=paused.copy_pauses,
        copy_paused_seconds_total=paused.copy_seconds,
        foreign_resumes_total=paused.foreign,
        reason=reason,
        periodic=figures.periodic.get(key),
        memory_quota_bytes=memory.quota_bytes if memory else None,
        allocations_denied_total=memory.denied if memory else 0,
        allocations_held_total=memory.held if memory else 0,
        rungs=escalation.rungs,
        troubles=escalation.troubles,
    )


def _reason(workload: Workload, share: Share | None, periodic: Devices, copies: str | None) -> str | None:
    classification = workload.classification
    if classification.misconfigured:
        return classification.reason
    reason = share.reason if share is not None and share.reason else _alone(workload, periodic)
    return "; ".join(part for part in (reason, copies) if part) or None


def _alone(workload: Workload, periodic: Devices) -> str | None:
    """Why an offline container has no share: no online container is there."""
    if not isinstance(workload.classification.rule, OfflineRule):
        return None
    if workload.devices & periodic:
        return "gives way to the requests of periodic containers"
    return "no online container on its GPUs"
