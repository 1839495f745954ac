# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Reads what one decision is made from: workloads, latencies, device slots and health, launch times, demand.

Owns what these readings need from decision to decision. For the deciding thread alone. A latency that cannot be read
is counted and hides nothing of the other containers.

Demand is what each offline process would use of a device if nothing held it: all of it while the process is being
stopped, else what it used in the last second, with some room to grow. Launch times by NVML are its time of a container
over its launches, for a process that has not waited for anything yet: coarser than the process's own waits
(agent/attribution/durations.py) and two seconds late, but no guess. A process that queues for minutes before its first
wait, or never waits, is held by what its kernels take.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from agent.attribution.durations import LaunchTimes
from agent.collectors.launches import DeliverySamples
from agent.containers.gpu_processes import GpuProcess, GpuProcessRegistry
from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, ContainerUsage, DeviceUuid, OnlineUse, ProcessId, Snapshot
from enforce.actuators.launch.levels import assign
from enforce.actuators.launch.pace import GateReader
from enforce.controller.decision import DecisionInputs
from enforce.device_health import SysMonitor
from enforce.model import Reading, Signal
from enforce.policy.model import OfflineRule, OnlineRule, Policy, Role
from enforce.signals.http import Http
from enforce.signals.latency_window import Counted, Requests
from enforce.workloads import Roles, Workload, log_misconfigured, processes_of, workloads_of

_WINDOW_NS = NS_PER_SECOND
_GROWTH, _LEAST = 1.5, 0.05


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one process since its start: estimated GPU time that it launched, ns, and how often it was stopped."""

    charged_ns: int
    pauses: int


class _Crowd(NamedTuple):
    """What each process on a device was charged, in ascending order, and the sums up to each."""

    charged: list[int]
    sums: list[int]

    @classmethod
    def of(cls, charged: Iterable[int]) -> _Crowd:
        """In any order."""
        ordered = sorted(charged)
        return cls(ordered, [0, *itertools.accumulate(ordered)])

    def turns(self, mine: int) -> float:
        """Of the others, for each one of a process of the device that was charged so much (> 0)."""
        if mine <= 0:
            return 0.0
        less = bisect_left(self.charged, mine)
        return self.sums[less] / mine + len(self.charged) - less - 1


@dataclass(slots=True)
class Demand:
    """Keeps a second of counters per process."""

    _points: dict[ProcessId, deque[tuple[int, Counters]]] = field(default_factory=dict)

    def observe(self, now_ns: int, counters: Mapping[ProcessId, Counters]) -> None:
        """Once per decision; a process that is not among them is forgotten."""
        self._points = {process: points for process, points in self._points.items() if process in counters}
        for process, now in counters.items():
            points = self._points.setdefault(process, deque())
            points.append((now_ns, now))
            while len(points) > 2 and points[1][0] <= now_ns - _WINDOW_NS:
                points.popleft()

    def wanted(self, processes: Iterable[ProcessId]) -> dict[ProcessId, float]:
        """Fractions 0–1 of a device; a process that was not seen long enough is left out."""
        return {process: one for process in processes if (one := self._wanted(process)) is not None}

    def own_ratios(self, at_work: Mapping[ProcessId, frozenset[DeviceUuid]]) -> dict[ProcessId, float]:
        """The part of what each process waits for that is its own work; those without neighbours are left out.

        A device takes turns between the processes with work queued on it. While one waits, another has a turn for each
        of its own, or fewer if it launches less. `at_work`: on which devices each process is.
        """
        charged = {
            process: points[-1][1].charged_ns - points[0][1].charged_ns for process, points in self._points.items()
        }
        by_device: dict[DeviceUuid, list[int]] = {}
        for process, ns in charged.items():
            for device in at_work.get(process, ()):
                by_device.setdefault(device, []).append(ns)
        crowds = {device: _Crowd.of(present) for device, present in by_device.items() if len(present) > 1}
        ratios = {}
        for process, mine in charged.items():
            others = [crowds[device].turns(mine) for device in at_work.get(process, ()) if device in crowds]
            if others and mine > 0:
                ratios[process] = 1 / (1 + max(others))
        return ratios

    def _wanted(self, process: ProcessId) -> float | None:
        points = self._points.get(process)
        if points is None or len(points) < 2:
            return None
        (then_ns, then), (now_ns, now) = points[0], points[-1]
        if now.pauses != then.pauses:
            return 1.0
        used = max(0, now.charged_ns - then.charged_ns) / max(1, now_ns - then_ns)
        return min(1.0, _LEAST + _GROWTH * used)


def launch_ns(snapshot: Snapshot) -> dict[ProcessId, float]:
    """Mean GPU time of a launch over the container's functions; absent where none was launched."""
    found: dict[ProcessId, float] = {}
    for row in snapshot.containers:
        mean_seconds = _mean_seconds(row)
        if mean_seconds:
            found.update(dict.fromkeys(row.processes, mean_seconds * NS_PER_SECOND))
    return found


def _mean_seconds(row: ContainerUsage) -> float | None:
    launches = total = 0.0
    for one in row.functions:
        if not one.launches_per_second:
            continue
        if one.gpu_seconds_per_launch is None:
            return None
        rate = one.launches_per_second / one.kernels_per_launch  # a graph is held at its launch, whatever is in it
        launches += rate
        total += rate * one.gpu_seconds_per_launch
    return total / launches if launches else None


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LatencyReader:
    """The latencies of online containers, by the signal that each one's SLO names."""

    signals: Mapping[str, Signal]
    requests: Requests
    unread: int = 0  # latencies, because of an exception

    def read(
        self, workloads: Mapping[ContainerKey, Workload], snapshot: Snapshot, now_ns: int
    ) -> dict[ContainerKey, Reading]:
        """Of each online container that has one; no data is absent, never 0."""
        found = ((key, self._read(workload, snapshot, now_ns)) for key, workload in workloads.items())
        return {key: reading for key, reading in found if reading is not None}

    def announce(self, workloads: Mapping[ContainerKey, Workload], slots: Mapping[DeviceUuid, int]) -> None:
        """The gates of their devices count requests where the signal sees them arrive. For decisions that act."""
        http = self.signals.get(Http.name)
        if not isinstance(http, Http):
            return
        for key, workload in workloads.items():
            rule = workload.classification.rule
            if isinstance(rule, OnlineRule) and rule.slo.signal == Http.name:
                http.announce(key, (slots[device] for device in workload.devices if device in slots))

    def counted(self, container: ContainerKey) -> Counted | None:
        """Its requests so far; None where its signal counts none."""
        return self.requests.of(container)

    def forget(self, gone: frozenset[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for signal in self.signals.values():
            signal.forget(gone)
        self.requests.forget(gone)

    def _read(self, workload: Workload, snapshot: Snapshot, now_ns: int) -> Reading | None:
        rule = workload.classification.rule
        if workload.classification.role is not Role.ONLINE or not isinstance(rule, OnlineRule):
            return None
        try:
            return self.signals[rule.slo.signal].read(snapshot, workload.container.key, rule.slo, now_ns)
        except Exception:  # noqa: BLE001  # one container's data must not end the decisions about the others
            self.unread += 1
            if self.unread & (self.unread - 1) == 0:  # the first, second, fourth, … time
                _log.exception("%s: its latency could not be read", workload.container.name)
            return None


class LaunchReader:
    """What the probes measured of launches: GPU time per launch of each process, and the gates of the devices."""

    def __init__(self, deliveries: DeliverySamples, gates: GateReader) -> None:
        self.gates = gates
        self._deliveries = deliveries
        self._times = LaunchTimes()
        self._nvml_at_ns: int | None = None  # of the snapshot that was last used for NVML's estimates

    def launch_ns(
        self, snapshot: Snapshot, processes: Set[ProcessId], own_ratios: Mapping[ProcessId, float], now_ns: int
    ) -> dict[ProcessId, float]:
        """Estimated GPU time of one launch of each of these processes; one without an estimate is absent.

        `own_ratios`: the part of what a process waits for that is its own work; 1 where it is missing.
        """
        if snapshot.at_ns != self._nvml_at_ns:  # about ten decisions see the same snapshot
            self._nvml_at_ns = snapshot.at_ns
            self._times.assume({process: ns for process, ns in launch_ns(snapshot).items() if process in processes})
        for delivery in self._deliveries.collect(now_ns):
            if delivery.process in processes:
                self._times.observe(delivery, own_ratios.get(delivery.process, 1.0))
        for process in self._times.processes() - processes:
            self._times.forget(process)
        return {process: ns for process in processes if (ns := self._times.per_launch_ns(process)) is not None}


@dataclass(frozen=True, slots=True)
class _OfSnapshot:
    """`snapshot`, `members` and `policy` are what the rest was made from."""

    snapshot: Snapshot | None = None
    members: tuple[GpuProcess, ...] = ()
    policy: Policy | None = None
    workloads: Mapping[ContainerKey, Workload] = field(default_factory=dict)
    offline: frozenset[ProcessId] = frozenset()
    launching: Mapping[ProcessId, frozenset[DeviceUuid]] = field(default_factory=dict)  # where a process is at work


class InputReader:
    """See the module. `unslotted`: devices beyond the kernel's slots, which are not controlled."""

    def __init__(
        self,
        roles: Roles,
        members: GpuProcessRegistry,
        latencies: LatencyReader,
        launches: LaunchReader,
        health: SysMonitor,
    ) -> None:
        self.latencies = latencies
        self.unslotted = 0
        self.roles, self._members, self._launches, self._health = roles, members, launches, health
        self._demand = Demand()
        self._slots: dict[DeviceUuid, int] = {}
        self._logged: dict[ContainerKey, str] = {}  # why a container that is present is misconfigured
        self._copy_groups: dict[ContainerKey, int] = {}
        self._group_numbers = itertools.count(1)
        self._of_snapshot = _OfSnapshot()

    def read(
        self,
        snapshot: Snapshot,
        counters: Mapping[ProcessId, Counters],
        shares: Mapping[ContainerKey, float],
        now_ns: int,
    ) -> DecisionInputs:
        """`counters`: of the processes that are paced. `shares`: of offline containers, as decided last."""
        seen = self._read_snapshot(snapshot)
        workloads = seen.workloads
        readings = self.latencies.read(workloads, snapshot, now_ns)
        slots = self._usable_slots(snapshot)
        health = self._health.look(snapshot, self.roles.policy)
        self._demand.observe(now_ns, counters)
        return DecisionInputs(
            workloads=workloads,
            readings=readings,
            slots=slots,
            launch_ns=self._launches.launch_ns(snapshot, seen.offline, self._demand.own_ratios(seen.launching), now_ns),
            wanted=self._demand.wanted(counters),
            busy=self._launches.gates.busy(slots, now_ns),
            blocks=self._launches.gates.blocks(slots),
            health=health,
            shares=shares,
            launching=seen.launching,
            copy_groups=self._paced_copies(workloads),
        )

    def changing(self) -> tuple[object, ...]:
        """What may change between two ticks: equal, no process on a GPU has come, and no online request begun."""
        return tuple(self._members.all()), self._launches.gates.requests()

    def online(self, slots: Mapping[DeviceUuid, int], now_ns: int) -> dict[DeviceUuid, OnlineUse]:
        """For Snapshot.online."""
        return self._launches.gates.online(slots, now_ns)

    def left_rules(self) -> dict[str, int]:
        """For Snapshot.left_rules."""
        return {f"{rule}:{reason}": count for (rule, reason), count in self.roles.memberships.left.items()}

    def losses(self) -> dict[str, int]:
        """What could not be read, or has no room: for Snapshot.lost."""
        return {"loop:unread": self.latencies.unread, "loop:no_slot": self.unslotted}

    def _read_snapshot(self, snapshot: Snapshot) -> _OfSnapshot:
        """What depends on the snapshot, the members and the policy alone: about ten decisions see the same ones."""
        last, members, policy = self._of_snapshot, self._members.all(), self.roles.policy
        if last.snapshot is snapshot and last.members is members and last.policy is policy:
            return last
        workloads = workloads_of(policy, members, snapshot, self.roles.memberships)
        self.latencies.forget(frozenset(last.workloads) - workloads.keys())
        self._logged = log_misconfigured(workloads, self._logged)
        offline = (one for one in workloads.values() if one.classification.role is Role.OFFLINE)
        processes = frozenset(process for one in offline for process in processes_of(one))
        self._of_snapshot = _OfSnapshot(snapshot, members, policy, workloads, processes, _launching(snapshot))
        return self._of_snapshot

    def _paced_copies(self, workloads: Mapping[ContainerKey, Workload]) -> dict[ContainerKey, int]:
        """Container → its number for the kernel, which it keeps while it is there."""
        if not self.roles.policy.pcie.pace:
            return {}
        paced = [key for key, one in workloads.items() if _may_wait(one)]
        self._copy_groups = {key: self._copy_groups.get(key) or next(self._group_numbers) for key in paced}
        return self._copy_groups

    def _usable_slots(self, snapshot: Snapshot) -> dict[DeviceUuid, int]:
        """Device → slot of the kernel's tables. A device that is lost keeps its slot, but is left out."""
        self._slots = assign(self._slots, [reading.device.uuid for reading in snapshot.devices])
        self.unslotted = len(snapshot.devices) - len(self._slots)
        lost = {reading.device.uuid for reading in snapshot.devices if reading.lost}
        return {device: slot for device, slot in self._slots.items() if device not in lost}


def _may_wait(workload: Workload) -> bool:
    rule = workload.classification.rule
    return workload.classification.role is Role.OFFLINE and isinstance(rule, OfflineRule) and rule.law != "off"


def _launching(snapshot: Snapshot) -> dict[ProcessId, frozenset[DeviceUuid]]:
    """The devices on which each process launched work in the last tick.

    Memory is no substitute: each rank of a job has some on every device.
    """
    return {
        row.process.id: devices
        for row in snapshot.processes
        if (devices := frozenset(usage.device for usage in row.usage if usage.launches_per_second))
    }
