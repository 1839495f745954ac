# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tick: collectors → identities → attribution → an immutable snapshot.

Owns the state between ticks: previous counts, learned durations, running totals. One thread calls `tick`; everybody
else reads `snapshot`. A collector that fails is reported and hides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from agent.attribution import Attribution, Work, attribute, sum_usage, without_instances
from agent.books import Books
from agent.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.containers.holdings import Held, holders
from agent.evidence import Evidence
from agent.function_names import FunctionNames
from agent.function_times import FunctionTimes, observe_all
from agent.kernels import FunctionWork, top_functions, weights
from agent.members import Member, Members, Told
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
    Usage,
)
from agent.ordinals import device_of
from agent.probes import Probes
from agent.samples import AGES_SECONDS, Collector, Sample
from agent.sm_time import Estimate, SmTime
from agent.sm_work import Tick
from agent.tally import Counted, Owner, ResolveDevice, Tally

_log = logging.getLogger(__name__)
_SWEEP_TICKS = 30
_MPS_SERVER = "nvidia-cuda-mps-server"
_AGES = (*(f"under_{seconds}_seconds" for seconds in AGES_SECONDS), "older")


@dataclass(frozen=True, slots=True)
class _Part:
    """One device's tick."""

    attribution: Attribution
    work: Sequence[Work]
    functions: Mapping[ProcessId, Sequence[FunctionWork]]


@dataclass(slots=True)
class Pipeline:
    """See the module."""

    collectors: Sequence[Collector]
    members: Members
    probes: Probes | None
    names: FunctionNames = field(default_factory=FunctionNames)
    snapshot: Snapshot | None = None
    enforcement: Mapping[ContainerKey, Enforcement] = field(default_factory=dict)  # written by whoever enforces
    enforcing: bool = False
    unprobed: tuple[ProcessId, ...] = ()  # on a GPU by NVML's word, with no call seen: their libcuda may be unknown
    nvml_errors: Callable[[], Mapping[str, int]] = dict
    name_lookups: Callable[[], Mapping[tuple[str, str], int]] = dict
    held: Callable[[], Held | None] = lambda: None
    losses: Callable[[], Mapping[str, int]] = dict  # "source:reason" → count, of other parts of the agent
    books: Books = field(default_factory=Books)
    _tally: Tally = field(default_factory=Tally)
    _times: FunctionTimes = field(default_factory=FunctionTimes)
    _sm_time: dict[DeviceUuid, SmTime] = field(default_factory=dict)
    _last_ns: int | None = None
    _exited: set[ProcessId] = field(default_factory=set)
    _probed: frozenset[ProcessId] = frozenset()
    _ticks: int = 0
    _orphaned: int = 0
    _unread: int = 0

    def tick(self, now_ns: int) -> Snapshot:
        """Observes once and publishes the snapshot."""
        dead = self._find_dead()  # before the samples are taken, so that these hold all that the dead ever did
        samples, health = self._collect(now_ns)
        interval = now_ns - self._last_ns if self._last_ns is not None else 0
        self._last_ns = now_ns
        evidence = Evidence.of(samples, self.members.proc)
        observe_all(self._times, evidence.deliveries)
        if self.probes:
            self.probes.tell_sm_count(evidence.sm_count)
        for process in evidence.processes:
            self.members.see(process)
        self.members.refresh()
        counted = self._tally.tick(samples, self._resolver(evidence))
        parts = _on_the_whole(self._parts(interval, evidence, counted))
        self.snapshot = self._snapshot(now_ns, interval, parts, health)
        self.unprobed = tuple(set(evidence.by_tgid.values()) - evidence.probed)
        self._bury(dead, evidence.probed, now_ns)
        return self.snapshot

    def seen(self, told: Told) -> None:
        """A probe saw its first call."""
        self.members.see(told.process, told)

    def exited(self, process: ProcessId) -> None:
        """A probe saw it die: its last figures are taken at the next tick, then it is forgotten."""
        self._exited.add(process)

    def replaced(self, process: ProcessId) -> None:
        """It runs another program: what it is called has changed."""
        self.members.renew(process)

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
        everything = tuple(reading.device.uuid for reading in evidence.readings)

        @cache  # a process has as many samples as it runs functions
        def resolve(process: ProcessId, ordinal: int | None) -> DeviceUuid | None:
            told = None if ordinal is None else evidence.told.get((process, ordinal))
            if told is not None:
                return told
            member = self.members.get(process)
            return device_of(ordinal, member.visible if member else everything, evidence.devices_of(process.tgid))

        return resolve

    def _parts(self, interval_ns: int, evidence: Evidence, counted: Mapping[Owner, Counted]) -> list[_Part]:
        by_device: dict[DeviceUuid, dict[ProcessId, Counted]] = {}
        devices: dict[ProcessId, int] = {}
        for (process, on), work in counted.items():
            by_device.setdefault(on, {})[process] = work
            devices[process] = devices.get(process, 0) + 1
        on_many = {process for process, number in devices.items() if number > 1}
        parts = [
            self._attribute(reading, interval_ns, evidence, by_device.pop(reading.device.uuid, {}), on_many)
            for reading in evidence.readings
        ]
        for here in by_device.values():  # nothing was read of the device in this tick, not even that it is lost
            self._unread += sum(work.kernels for work in here.values())
        return parts

    def _attribute(
        self,
        reading: DeviceReading,
        interval_ns: int,
        evidence: Evidence,
        here: dict[ProcessId, Counted],
        on_many: Collection[ProcessId],
    ) -> _Part:
        device = reading.device.uuid
        estimates = self._estimate(reading, interval_ns, here, evidence, on_many)
        for tgid in evidence.tgids_on(device):
            process = evidence.by_tgid.get(tgid)
            if process is not None:
                here.setdefault(process, Counted())
        work, orphaned = [], 0
        for process, mine in here.items():
            member = self.members.get(process)
            if member is not None:
                work.append(_work(reading, interval_ns, member, mine, estimates.get(process), evidence))
            else:  # gone before anybody could read whose it was: what it did stays unattributed
                orphaned += mine.kernels
        self._orphaned += orphaned
        attribution = attribute(reading, work, interval_ns, others=orphaned > 0)
        functions = {p: self._functions(attribution, p, mine) for p, mine in here.items() if mine.functions}
        return _Part(attribution, work, functions)

    def _estimate(
        self,
        reading: DeviceReading,
        interval_ns: int,
        here: Mapping[ProcessId, Counted],
        evidence: Evidence,
        on_many: Collection[ProcessId],
    ) -> Mapping[ProcessId, Estimate]:
        device, activity = reading.device.uuid, reading.sm_activity_ratio
        busy = {p: r for p in here if (r := evidence.utilization_of(p, device)) is not None}
        tick = Tick(
            interval_ns=interval_ns,
            counted_ns=evidence.counted_ns or interval_ns,
            activity_ns=None if activity is None else activity * interval_ns,
            is_share_of_sms=reading.sm_activity_source != "utilization",
            sm_count=reading.device.sm_count,
            work={process: mine.functions for process, mine in here.items()},
            busy_ns={process: ratio * interval_ns for process, ratio in busy.items()},
            sm_limits={p: member.sm_limit for p in here if (member := self.members.get(p))},
            side_by_side=[p for p in here if (p.tgid, device) in evidence.side_by_side],
            programs={p: member.process.command for p in here if p not in on_many and (member := self.members.get(p))},
            deliveries=evidence.deliveries,
            on_many_devices=on_many,
        )
        return self._sm_time.setdefault(device, SmTime(self._times)).observe(tick)

    def _functions(self, attribution: Attribution, process: ProcessId, counted: Counted) -> list[FunctionWork]:
        device = attribution.reading.device.uuid
        usage = attribution.usage.get(process)
        gpu_ns = {function: self._sm_time[device].gpu_ns(process, function) for function in counted.functions}
        parts = weights(gpu_ns, {function: one.launches for function, one in counted.functions.items()})
        return [
            FunctionWork(
                device,
                self.names.name(process, function),
                one.launches,
                one.kernels,
                parts[function],
                usage.sm_ratio if usage else None,
                gpu_ns[function],
            )
            for function, one in counted.functions.items()
        ]

    def _snapshot(
        self, now_ns: int, interval_ns: int, parts: Sequence[_Part], health: Sequence[CollectorHealth]
    ) -> Snapshot:
        seconds = interval_ns / NS_PER_SECOND
        by_process: dict[ProcessId, list[Usage]] = {}
        rest = []
        for part in parts:
            for one in part.work:
                usage = part.attribution.usage[one.process]
                by_process.setdefault(one.process, []).append(usage)
                if (member := self.members.get(one.process)) is not None:
                    self.books.book(member.container, one, usage, seconds)
            rest.append(self.books.rest(part.attribution.unattributed, seconds))
            self.books.count_device(part.attribution, sum(one.launches or 0 for one in part.work), seconds)
        return Snapshot(
            at_ns=now_ns,
            wall_ns=wall_ns(),
            interval_ns=interval_ns,
            devices=tuple(part.attribution.reading for part in parts),
            containers=self._containers(by_process, parts, seconds),
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
            device_totals=dict(self.books.devices),
            ended=self.books.ended(now_ns),
            held=holders(self.held() or {}),
            probe_calls=self.probes.calls() if self.probes else {},
            nvml_errors=dict(self.nvml_errors()),
            name_lookups={f"{source}:{outcome}": n for (source, outcome), n in self.name_lookups().items()},
        )

    def _lost(self) -> dict[str, int]:
        lost = {f"map:{name}": count for name, count in self.probes.lost()} if self.probes else {}
        return {
            **lost,
            **self.losses(),
            "members:full": self.members.refused,
            "members:unreadable": self.members.unreadable,
            "names:full": self.names.refused,
            "ended:unscraped": self.books.dropped,
            "counts:implausible": self._tally.implausible,
            "launches:no_device": self._tally.unplaced,
            "launches:no_container": self._orphaned,
            "launches:no_reading": self._unread,
        }

    def _containers(
        self, by_process: Mapping[ProcessId, Sequence[Usage]], parts: Iterable[_Part], seconds: float
    ) -> tuple[ContainerUsage, ...]:
        grouped: dict[ContainerKey, list[ProcessId]] = {}
        containers = {}
        for process in by_process:
            member = self.members.get(process)
            if member is not None:
                grouped.setdefault(member.container.key, []).append(process)
                containers[member.container.key] = member.container
        functions: dict[ProcessId, list[FunctionWork]] = {}
        for part in parts:
            for process, work in part.functions.items():
                functions.setdefault(process, []).extend(work)
        return tuple(
            ContainerUsage(
                containers[key],
                sum_usage([usage for process in processes for usage in by_process[process]], self.books.of(key)),
                tuple(processes),
                top_functions((one for process in processes for one in functions.get(process, ())), seconds),
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

    def _bury(self, dead: Collection[ProcessId], probed: frozenset[ProcessId], now_ns: int) -> None:
        """Forgets the dead; their last figures are in the snapshot that was just published."""
        if dead:
            before = {member.container.key: member.container for member in self.members.all()}
            for collector in self.collectors:
                collector.forget(dead)
            self._tally.forget(dead)
            self._times.forget(dead)
            self.names.forget(dead)
            for sm_time in self._sm_time.values():
                sm_time.forget(dead)
            self.members.remove(dead)
            self._exited.difference_update(dead)
            living = {member.container.key for member in self.members.all()}
            self.books.end((container for key, container in before.items() if key not in living), now_ns)
        self._probed = probed.difference(dead)
        if self._ticks % _SWEEP_TICKS == 0:
            self.names.retain({member.process.id for member in self.members.all()} | self._probed)


def _on_the_whole(parts: Sequence[_Part]) -> list[_Part]:
    """Where a GPU is split into MIG instances, its own part without what they did."""
    instances: dict[DeviceUuid, list[Attribution]] = {}
    for part in parts:
        parent = part.attribution.reading.device.parent
        if parent is not None:
            instances.setdefault(parent, []).append(part.attribution)
    return [
        replace(part, attribution=without_instances(part.attribution, instances[uuid]))
        if (uuid := part.attribution.reading.device.uuid) in instances
        else part
        for part in parts
    ]


def _work(
    reading: DeviceReading,
    interval_ns: int,
    member: Member,
    counted: Counted,
    estimate: Estimate | None,
    evidence: Evidence,
) -> Work:
    process, device = member.process.id, reading.device.uuid
    live = counted.live_bytes
    on_device = None if live is None else sum(size for kind, size in live.items() if kind != "pinned")
    told = evidence.memory_of(process, device)
    memory = on_device if told is None else told
    kinds = {
        "memory_peak_bytes": counted.peak_bytes or None,
        "memory_by_kind": live or {},
        "memory_by_age": dict(zip(_AGES, counted.live_by_age, strict=False)),
    }
    if not interval_ns:
        return Work(process, None, None, None, None, memory, **kinds)  # type: ignore[arg-type]
    if process not in evidence.probed:  # NVML's share of time is the only thing that is known about its kernels
        ratio = _told_ratio(reading, member, evidence)
        return Work(process, None, None if ratio is None else ratio * interval_ns, None, None, memory)
    if estimate is None:
        estimate = Estimate(0.0, 0.0)
    return Work(
        process,
        counted.kernels,
        estimate.sm_ns,
        counted.pcie_tx_bytes,
        counted.pcie_rx_bytes,
        memory,
        estimate.error_ns,
        **kinds,  # type: ignore[arg-type]
    )


def _told_ratio(reading: DeviceReading, member: Member, evidence: Evidence) -> float | None:
    """NVML leaves out who did nothing. Some drivers credit the MPS server with what its clients did: not to it."""
    if member.process.command.split(" ")[0].rpartition("/")[2] == _MPS_SERVER:
        return 0.0
    if reading.device.parent is not None:
        return None  # no utilisation by process on MIG
    return evidence.utilization.get((member.process.id.tgid, reading.device.uuid), 0.0)
