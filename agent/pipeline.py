# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tick: collectors → identities → attribution → an immutable snapshot.

Owns the state between ticks: previous counts, learned durations, running totals. One thread calls `tick`; everybody
else reads `snapshot`. A collector that fails is reported and hides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.attribution import Attribution, Work, add, attribute, grown, sum_usage
from agent.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.delivery import BusyTimes, LaunchTimes
from agent.durations import Function, SmTimes, Tick
from agent.evidence import Evidence
from agent.members import Members
from agent.model import (
    CollectorHealth,
    ContainerKey,
    ContainerUsage,
    DeviceReading,
    DeviceUuid,
    Enforcement,
    ProcessId,
    ProcessUsage,
    Snapshot,
    Totals,
    Unattributed,
    Usage,
)
from agent.occupancy import sm_fraction
from agent.ordinals import device_of
from agent.probes import Probes
from agent.samples import Collector, Delivered, Sample
from agent.tally import Counted, Owner, ResolveDevice, Tally

_log = logging.getLogger(__name__)
_SWEEP_TICKS = 30
_MOST_TIME_IN_TURNS = 1.05  # more, and processes run side by side (MPS): NVML's time shares overlap


@dataclass(slots=True)
class Pipeline:
    """See the module."""

    collectors: Sequence[Collector]
    members: Members
    probes: Probes | None
    snapshot: Snapshot | None = None
    enforcement: Mapping[ContainerKey, Enforcement] = field(default_factory=dict)  # written by whoever enforces
    enforcing: bool = False
    unprobed: tuple[ProcessId, ...] = ()  # on a GPU by NVML's word, with no call seen: their libcuda may be unknown
    _tally: Tally = field(default_factory=Tally)
    _launch_times: LaunchTimes = field(default_factory=LaunchTimes)
    _sm_times: dict[DeviceUuid, SmTimes] = field(default_factory=dict)
    _totals: dict[tuple[ContainerKey, DeviceUuid], Totals] = field(default_factory=dict)
    _rest_totals: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _device_totals: dict[DeviceUuid, Totals] = field(default_factory=dict)
    _last_ns: int | None = None

    _busy_times: BusyTimes = field(default_factory=BusyTimes)
    _exited: set[ProcessId] = field(default_factory=set)
    _probed: frozenset[ProcessId] = frozenset()
    _ticks: int = 0
    _orphaned: int = 0

    def tick(self, now_ns: int) -> Snapshot:
        """Observes once and publishes the snapshot."""
        dead = self._find_dead()  # before the samples are taken, so that these hold all that the dead ever did
        samples, health = self._collect(now_ns)
        interval = now_ns - self._last_ns if self._last_ns is not None else 0
        self._last_ns = now_ns
        for sample in samples:
            if isinstance(sample, Delivered):
                self._launch_times.observe(sample)
        evidence = Evidence.of(samples, self.members.proc)
        for process in evidence.processes:
            self.members.see(process)
        counted = self._tally.tick(samples, self._resolver(evidence))
        parts = [self._attribute(reading, interval, evidence, counted) for reading in evidence.readings]
        self.snapshot = self._snapshot(now_ns, interval, parts, health)
        self.unprobed = tuple(set(evidence.by_tgid.values()) - evidence.probed)
        self._bury(dead, evidence.probed)
        return self.snapshot

    def exited(self, process: ProcessId) -> None:
        """A probe saw it die: its last figures are taken at the next tick, then it is forgotten."""
        self._exited.add(process)

    def _collect(self, now_ns: int) -> tuple[list[Sample], list[CollectorHealth]]:
        samples: list[Sample] = []
        health = []
        for collector in self.collectors:
            began, error = monotonic_ns(), None
            try:
                samples.extend(collector.collect(now_ns))
            except Exception as failure:  # noqa: BLE001  # whatever one source does, the others go on; it is exported
                error = f"{type(failure).__name__}: {failure}"
                _log.warning("collector %s: %s", collector.name, error)
            health.append(CollectorHealth(collector.name, (monotonic_ns() - began) / NS_PER_SECOND, error))
        return samples, health

    def _resolver(self, evidence: Evidence) -> ResolveDevice:
        def resolve(process: ProcessId, ordinal: int | None) -> DeviceUuid | None:
            member = self.members.get(process)
            visible = member.visible if member else tuple(r.device.uuid for r in evidence.readings)
            return device_of(ordinal, visible, evidence.devices_of(process.tgid))

        return resolve

    def _attribute(
        self, reading: DeviceReading, interval_ns: int, evidence: Evidence, counted: Mapping[Owner, Counted]
    ) -> tuple[Attribution, list[Work]]:
        device = reading.device.uuid
        here = {process: work for (process, on), work in counted.items() if on == device}
        self._learn(reading, interval_ns, here, evidence)
        for tgid in evidence.tgids_on(device):
            process = evidence.by_tgid.get(tgid)
            if process is not None:
                here.setdefault(process, Counted())
        work = []
        for process, mine in here.items():
            if self.members.get(process) is not None:
                work.append(self._work(reading, interval_ns, process, mine, evidence))
            else:  # gone before anybody could read whose it was: what it did stays unattributed
                self._orphaned += sum(mine.launches.values())
        return attribute(reading, work, interval_ns), work

    def _learn(
        self, reading: DeviceReading, interval_ns: int, here: Mapping[ProcessId, Counted], evidence: Evidence
    ) -> None:
        if reading.sm_activity_ratio is None or not interval_ns:
            return
        launches: dict[Function, int] = {}
        priors: dict[Function, float] = {}
        utilization = {p: evidence.utilization.get((p.tgid, reading.device.uuid)) for p in here}
        take_turns = sum(ratio or 0.0 for ratio in utilization.values()) <= _MOST_TIME_IN_TURNS
        for process, counted in here.items():
            busy_ns = None if (ratio := utilization[process]) is None else ratio * interval_ns
            self._busy_times.observe(process, sum(counted.launches.values()), busy_ns if take_turns else None)
            mean = self._busy_times.per_launch_ns(process) or self._launch_times.per_launch_ns(process)
            for function, count in counted.launches.items():
                launches[process, function] = count
                blocks, threads = counted.groups.get(function, (0.0, 0))
                if mean is not None and blocks:
                    priors[process, function] = mean * sm_fraction(blocks, threads, reading.device.sm_count)
        tick = Tick(reading.sm_activity_ratio * interval_ns, launches)
        self._sm_times.setdefault(reading.device.uuid, SmTimes()).observe(tick, priors)

    def _work(
        self, reading: DeviceReading, interval_ns: int, process: ProcessId, counted: Counted, evidence: Evidence
    ) -> Work:
        device = reading.device.uuid
        memory = evidence.memory.get((process.tgid, device), counted.live_bytes)
        if not interval_ns:
            return Work(process, None, None, None, None, memory)
        if process not in evidence.probed:  # NVML's share of time is the only thing that is known about its kernels
            ratio = evidence.utilization.get((process.tgid, device), 0.0)
            return Work(process, None, ratio * interval_ns, None, None, memory)
        times = self._sm_times.get(device)
        sm_ns = sum((times.sm_ns((process, f)) or 0.0) * n for f, n in counted.launches.items()) if times else None
        launches = sum(counted.launches.values())
        return Work(process, launches, sm_ns, counted.pcie_tx_bytes, counted.pcie_rx_bytes, memory)

    def _snapshot(
        self,
        now_ns: int,
        interval_ns: int,
        parts: Sequence[tuple[Attribution, Sequence[Work]]],
        health: Sequence[CollectorHealth],
    ) -> Snapshot:
        seconds = interval_ns / NS_PER_SECOND
        by_process: dict[ProcessId, list[Usage]] = {}
        rest = []
        for attribution, work in parts:
            for one in work:
                usage = attribution.usage[one.process]
                by_process.setdefault(one.process, []).append(usage)
                self._book(one, usage, seconds)
            rest.append(self._with_totals(attribution.unattributed, seconds))
            self._count_device(attribution.reading, sum(one.launches or 0 for one in work), seconds)
        return Snapshot(
            at_ns=now_ns,
            wall_ns=wall_ns(),
            interval_ns=interval_ns,
            devices=tuple(attribution.reading for attribution, _ in parts),
            containers=self._containers(by_process),
            processes=tuple(
                ProcessUsage(member.process, tuple(usage))
                for process, usage in by_process.items()
                if (member := self.members.get(process))
            ),
            unattributed=tuple(rest),
            enforcement=dict(self.enforcement),
            enforcing=self.enforcing,
            probes=tuple(library.status() for library in self.probes.libraries()) if self.probes else (),
            collectors=tuple(health),
            lost=self._lost(),
            device_totals=dict(self._device_totals),
        )

    def _lost(self) -> dict[str, int]:
        lost = {f"map:{name}": count for name, count in self.probes.lost()} if self.probes else {}
        return {
            **lost,
            "members:full": self.members.refused,
            "launches:no_device": self._tally.unplaced,
            "launches:no_container": self._orphaned,
        }

    def _book(self, work: Work, usage: Usage, seconds: float) -> None:
        member = self.members.get(work.process)
        if member is not None:
            key = (member.container.key, usage.device)
            self._totals[key] = add(self._totals.get(key, Totals()), usage, work, seconds)

    def _with_totals(self, rest: Unattributed, seconds: float) -> Unattributed:
        before = self._rest_totals.get(rest.device, Totals())
        totals = grown(before, rest.sm_ratio, rest.pcie_tx_bytes_per_second, rest.pcie_rx_bytes_per_second, seconds)
        self._rest_totals[rest.device] = totals
        return replace(rest, totals=totals)

    def _count_device(self, reading: DeviceReading, launches: int, seconds: float) -> None:
        device = reading.device.uuid
        before = self._device_totals.get(device, Totals())
        tx, rx = reading.pcie_tx_bytes_per_second, reading.pcie_rx_bytes_per_second
        after = grown(before, reading.sm_activity_ratio, tx, rx, seconds)
        self._device_totals[device] = replace(after, launches=before.launches + launches)

    def _containers(self, by_process: Mapping[ProcessId, Sequence[Usage]]) -> tuple[ContainerUsage, ...]:
        grouped: dict[ContainerKey, list[ProcessId]] = {}
        containers = {}
        for process in by_process:
            member = self.members.get(process)
            if member is not None:
                grouped.setdefault(member.container.key, []).append(process)
                containers[member.container.key] = member.container
        return tuple(
            ContainerUsage(
                containers[key],
                sum_usage([usage for process in processes for usage in by_process[process]], key, self._totals),
                tuple(processes),
            )
            for key, processes in grouped.items()
        )

    def _find_dead(self) -> list[ProcessId]:
        """Those that a probe saw dying, and now and then whoever died unseen."""
        self._ticks += 1
        known = {member.process.id for member in self.members.all()} | self._probed
        candidates = known if self._ticks % _SWEEP_TICKS == 0 else self._exited & known
        self._exited &= known
        return [process for process in candidates if not self.members.proc.is_alive(process)]

    def _bury(self, dead: Sequence[ProcessId], probed: frozenset[ProcessId]) -> None:
        """Forgets the dead; their last figures are in the snapshot that was just published."""
        for process in dead:
            for collector in self.collectors:
                collector.forget(process)
            self._tally.forget(process)
            self._launch_times.forget(process)
            self._busy_times.forget(process)
            for times in self._sm_times.values():
                times.forget(process)
        self.members.remove(dead)
        self._exited.difference_update(dead)
        self._probed = probed.difference(dead)
        living = {member.container.key for member in self.members.all()}
        self._totals = {key: totals for key, totals in self._totals.items() if key[0] in living}
