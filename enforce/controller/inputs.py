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
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.attribution.durations import LaunchTimes
from agent.collectors.launches import Deliveries
from agent.containers.gpu_processes import GpuProcessRegistry
from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, ContainerUsage, DeviceUuid, OnlineUse, ProcessId, Snapshot
from enforce.actuators.launch.levels import assign
from enforce.actuators.launch.pace import GateReader
from enforce.controller.decision import DecisionInputs
from enforce.device_health import SysMonitor
from enforce.model import Reading, Signal
from enforce.policy.model import OfflineRule, OnlineRule, Role
from enforce.signals.latency_window import Counted, Requests
from enforce.workloads import Roles, Workload, log_misconfigured, workloads_of

_WINDOW_NS = NS_PER_SECOND
_GROWTH, _LEAST = 1.5, 0.05


@dataclass(frozen=True, slots=True)
class Counters:
    """Of one process since its start: estimated GPU time that it launched, ns, and how often it was stopped."""

    charged_ns: int
    pauses: int


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
    """Mean GPU time of a launch over the container's functions; absent where none was launched, or a graph."""
    found: dict[ProcessId, float] = {}
    for row in snapshot.containers:
        mean_seconds = _mean_seconds(row)
        if mean_seconds:
            found.update(dict.fromkeys(row.processes, mean_seconds * NS_PER_SECOND))
    return found


def _mean_seconds(row: ContainerUsage) -> float | None:
    launched = [one for one in row.functions if one.launches_per_second]
    if not launched or any(one.is_graph for one in launched):  # kernels are counted there, and launches are held
        return None
    launches = total = 0.0
    for one in launched:
        if one.gpu_seconds_per_launch is None:
            return None
        launches += one.launches_per_second
        total += one.launches_per_second * one.gpu_seconds_per_launch
    return total / launches


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

    def __init__(self, members: GpuProcessRegistry, deliveries: Deliveries, gates: GateReader) -> None:
        self.gates = gates
        self._members, self._deliveries = members, deliveries
        self._times = LaunchTimes()
        self._nvml_at_ns: int | None = None  # of the snapshot that was last used for NVML's estimates

    def launch_ns(self, snapshot: Snapshot, now_ns: int) -> dict[ProcessId, float]:
        """Estimated GPU time of one launch of each process on a GPU; a process without an estimate is absent."""
        if snapshot.at_ns != self._nvml_at_ns:  # about ten decisions see the same snapshot
            self._nvml_at_ns = snapshot.at_ns
            self._times.assume(launch_ns(snapshot))
        for delivery in self._deliveries.collect(now_ns):
            self._times.observe(delivery)
        alive = {member.process.id for member in self._members.all()}
        for process in self._times.processes() - alive:
            self._times.forget(process)
        return {process: ns for process in alive if (ns := self._times.per_launch_ns(process)) is not None}


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
        self._present: frozenset[ContainerKey] = frozenset()
        self._logged: dict[ContainerKey, str] = {}  # why a container that is present is misconfigured
        self._copy_groups: dict[ContainerKey, int] = {}
        self._group_numbers = itertools.count(1)

    def read(
        self,
        snapshot: Snapshot,
        counters: Mapping[ProcessId, Counters],
        shares: Mapping[ContainerKey, float],
        now_ns: int,
    ) -> DecisionInputs:
        """`counters`: of the processes that are paced. `shares`: of offline containers, as decided last."""
        workloads = self._workloads(snapshot)
        readings = self.latencies.read(workloads, snapshot, now_ns)
        slots = self._usable_slots(snapshot)
        health = self._health.look(snapshot, self.roles.policy)
        self._demand.observe(now_ns, counters)
        return DecisionInputs(
            workloads=workloads,
            readings=readings,
            slots=slots,
            launch_ns=self._launches.launch_ns(snapshot, now_ns),
            wanted=self._demand.wanted(counters),
            busy=self._launches.gates.busy(slots, now_ns),
            blocks=self._launches.gates.blocks(slots),
            health=health,
            shares=shares,
            launching=_launching(snapshot),
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

    def _workloads(self, snapshot: Snapshot) -> dict[ContainerKey, Workload]:
        workloads = workloads_of(self.roles.policy, self._members.all(), snapshot, self.roles.memberships)
        self.latencies.forget(self._present - workloads.keys())
        self._present = frozenset(workloads)
        self._logged = log_misconfigured(workloads, self._logged)
        return workloads

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
