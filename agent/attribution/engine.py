# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process did on each device in a tick, out of all samples of the tick.

Owns what continues from tick to tick: previous counts, learned durations, and counts of what could not be attributed.
Also here: the kernel functions on which each container spends most SM time; for people, never a metric's label.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.attribution.counters import CountedWork, CounterDeltas, Owner
from agent.attribution.durations import FunctionTimes
from agent.attribution.inputs import TickInputs
from agent.attribution.placement import Placements, fitted
from agent.attribution.process_work import TickWork, Unseen, poll_error
from agent.attribution.sm_time import Estimate, SmTime
from agent.attribution.split import Attribution, Present, Work, attribute, without_instances
from agent.attribution.unprobed import Launched, ProcessTick, UnprobedWork
from agent.collectors.samples import AGES_SECONDS, Sample
from agent.containers.gpu_processes import GpuProcess, GpuProcessRegistry
from agent.core.clock import NS_PER_SECOND
from agent.core.device_ordinals import Ordinals
from agent.core.model import DeviceReading, DeviceUuid, FunctionUsage, ProcessId
from agent.probes.events import FunctionNames

MOST = 20


@dataclass(frozen=True, slots=True)
class FunctionWork:
    """Launches of one function by one process in a tick. `weight`: its part of the process's SM time, 0–1."""

    device: DeviceUuid
    name: str
    launches: int
    kernels: int
    weight: float | None
    sm_ratio: float | None  # of the whole process
    gpu_ns: float | None


def top_functions(work: Iterable[FunctionWork], seconds: float) -> tuple[FunctionUsage, ...]:
    """Summed over processes by name and device, those with the most SM time first."""
    groups: dict[tuple[str, DeviceUuid], list[FunctionWork]] = {}
    for one in work:
        groups.setdefault((one.name, one.device), []).append(one)
    made = [_sum(name, device, parts, seconds) for (name, device), parts in groups.items()] if seconds else []
    made.sort(key=lambda one: (-(one.sm_ratio or 0.0), -one.launches_per_second, one.name))
    return tuple(made[:MOST])


def weights(gpu_ns: Mapping[int, float | None], launches: Mapping[int, int]) -> dict[int, float | None]:
    """Each function's part of the process's GPU time; None where any duration is unknown."""
    spent = {f: (gpu_ns[f] or 0.0) * n for f, n in launches.items()}
    total = sum(spent.values())
    if not total or any(gpu_ns[f] is None for f, n in launches.items() if n):
        return dict.fromkeys(launches)
    return {f: ns / total for f, ns in spent.items()}


def _sum(name: str, device: DeviceUuid, parts: list[FunctionWork], seconds: float) -> FunctionUsage:
    launches, kernels = sum(one.launches for one in parts), sum(one.kernels for one in parts)
    known = [(one.sm_ratio, one.weight) for one in parts]
    ratios = [ratio * weight for ratio, weight in known if ratio is not None and weight is not None]
    times = [(one.gpu_ns, one.launches) for one in parts if one.gpu_ns is not None and one.launches]
    spent = sum(ns * count for ns, count in times)
    return FunctionUsage(
        name=name,
        device=device,
        launches_per_second=kernels / seconds,
        sm_ratio=sum(ratios) if len(ratios) == len(known) else None,
        gpu_seconds_per_launch=spent / sum(count for _, count in times) / NS_PER_SECOND if times else None,
        is_graph=any(one.kernels != one.launches for one in parts) and launches > 0,
        kernels_per_launch=kernels / launches if launches and kernels else 1.0,
    )


_AGES = (*(f"under_{seconds}_seconds" for seconds in AGES_SECONDS), "older")


@dataclass(frozen=True, slots=True)
class DeviceTick:
    """One device's tick: its split, and what processes and functions did."""

    attribution: Attribution
    work: Sequence[Work]
    functions: Mapping[ProcessId, Sequence[FunctionWork]]


@dataclass(slots=True)
class AttributionEngine:
    """See the module. `sees_returns`: False where there are no return probes, so copies are not counted."""

    members: GpuProcessRegistry
    names: FunctionNames
    sees_returns: bool = True
    unprobed: UnprobedWork = field(default_factory=UnprobedWork)
    _deltas: CounterDeltas = field(default_factory=CounterDeltas)
    _placements: Placements = field(default_factory=Placements)
    _times: FunctionTimes = field(default_factory=FunctionTimes)
    _sm_time: dict[DeviceUuid, SmTime] = field(default_factory=dict)
    _pending: dict[DeviceUuid, Mapping[ProcessId, float]] = field(default_factory=dict)
    _orphaned: int = 0
    _unread: int = 0
    _unlisted: int = 0  # claims that did not count: one per process and device in a tick

    def tick(self, samples: Sequence[Sample], inputs: TickInputs, interval_ns: int) -> list[DeviceTick]:
        """One part per device that was read. MIG: what instances did is not in the part of their GPU."""
        for process, deliveries in inputs.deliveries.items():
            for delivery in deliveries:
                self._times.observe(process, delivery)
        self._placements.observe(samples, inputs, self.members.get, interval_ns)
        counted = self._deltas.tick(samples, self._placements.resolve, interval_ns)
        self._unlisted += len(self._deltas.unlisted)
        self.unprobed.observe(self._process_ticks(inputs, counted, interval_ns), interval_ns)
        if present := {reading.device.uuid for reading in inputs.readings}:
            self._sm_time = {device: known for device, known in self._sm_time.items() if device in present}
            self._pending = {device: left for device, left in self._pending.items() if device in present}
        return _without_instances(self._parts(interval_ns, inputs, counted))

    def ordinals(self) -> dict[ProcessId, Ordinals]:
        """The devices of the processes whose ordinals are not what their environment says."""
        return self._placements.ordinals()

    def lost(self) -> dict[str, int]:
        """What was counted and could not be attributed, since start: for Snapshot.lost."""
        return {
            "claims:unlisted": self._unlisted,
            "counts:implausible": self._deltas.implausible,
            "launches:no_device": self._deltas.unplaced,
            "launches:no_container": self._orphaned,
            "launches:no_reading": self._unread,
            "names:full": self.names.refused,
        }

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone."""
        self._deltas.forget(processes)
        self._times.forget(processes)
        self.names.forget(processes)
        self.unprobed.forget(processes)
        for sm_time in self._sm_time.values():
            sm_time.forget(processes)

    def _process_ticks(
        self, inputs: TickInputs, counted: Mapping[Owner, CountedWork], interval_ns: int
    ) -> Iterator[ProcessTick]:
        """What NVML and the probes say of each process; MPS clients, whose time may be the server's, are left out."""
        reported = {(inputs.by_tgid[tgid], device) for tgid, device in inputs.utilization if tgid in inputs.by_tgid}
        with_mps = {device for _, device in inputs.side_by_side}
        for process, device in sorted(reported | counted.keys()):
            ratio = inputs.utilization_of(process, device)
            busy_ns = None if ratio is None else ratio * interval_ns
            if (container := self.members.outside(process)) is not None:
                yield ProcessTick(process, container, device, busy_ns, [])  # counted or not, no rule reaches it
                continue
            member = self.members.get(process)
            if member is None or (process.tgid, device) in inputs.side_by_side:
                continue
            if device in with_mps and member.is_mps_server:
                continue
            functions = counted[process, device].functions if (process, device) in counted else {}
            launched = [
                Launched(one.launches, one.kernels, self._times.per_launch_ns(process, function))
                for function, one in functions.items()
            ]
            yield ProcessTick(process, member.container.key, device, busy_ns, launched)

    def _parts(self, interval_ns: int, inputs: TickInputs, counted: Mapping[Owner, CountedWork]) -> list[DeviceTick]:
        by_device: dict[DeviceUuid, dict[ProcessId, CountedWork]] = {}
        devices: dict[ProcessId, int] = {}
        for (process, on), work in counted.items():
            by_device.setdefault(on, {})[process] = work
            devices[process] = devices.get(process, 0) + 1
        on_many = {process for process, number in devices.items() if number > 1}
        parts = [
            self._attribute(reading, interval_ns, inputs, by_device.pop(reading.device.uuid, {}), on_many)
            for reading in inputs.readings
        ]
        for unread in by_device.values():  # nothing was read of the device in this tick, not even that it is lost
            self._unread += sum(work.kernels for work in unread.values())
        return parts

    def _attribute(
        self,
        reading: DeviceReading,
        interval_ns: int,
        inputs: TickInputs,
        counted: dict[ProcessId, CountedWork],
        on_many: Collection[ProcessId],
    ) -> DeviceTick:
        device = reading.device.uuid
        unseen = self._unseen_on(inputs, device)
        busy = sum(ratio for (_, on), ratio in inputs.utilization.items() if on == device)
        others = self._others(inputs, device, unseen, busy, interval_ns)
        estimates = self._sm_time.setdefault(device, SmTime(self._times)).observe(
            self._tick(reading, interval_ns, counted, inputs, on_many), others
        )
        for tgid in inputs.tgids_on(device):
            process = inputs.by_tgid.get(tgid)
            if process is not None:
                counted.setdefault(process, CountedWork())
        memory = _memory(reading, inputs, counted)
        of_device = _DeviceWork(reading, interval_ns, inputs, memory, busy, self.sees_returns, unseen)
        work, orphaned = [], 0
        for process, mine in counted.items():
            member = self.members.get(process)
            if member is not None:
                work.append(of_device.of(member, mine, estimates.get(process)))
            else:  # gone before its container could be read: what it did stays unattributed
                orphaned += mine.kernels
        self._orphaned += orphaned
        newcomers = {process for process, mine in counted.items() if mine.is_new}
        present = Present(
            sole=inputs.sole_on(device) if not orphaned and not newcomers else None,
            others=orphaned > 0 or others is not None,
            newcomers=newcomers,
        )
        attribution = attribute(reading, work, interval_ns, present, self._pending.get(device, {}))
        self._pending[device] = attribution.pending
        functions = {p: self._functions(attribution, p, mine) for p, mine in counted.items() if mine.functions}
        return DeviceTick(attribution, work, functions)

    def _tick(
        self,
        reading: DeviceReading,
        interval_ns: int,
        counted: Mapping[ProcessId, CountedWork],
        inputs: TickInputs,
        on_many: Collection[ProcessId],
    ) -> TickWork:
        device, activity = reading.device.uuid, reading.sm_activity_ratio
        busy = {p: r for p in counted if (r := inputs.utilization_of(p, device)) is not None}
        return TickWork(
            interval_ns=interval_ns,
            counted_ns=inputs.counted_ns or interval_ns,
            activity_ns=None if activity is None else activity * interval_ns,
            is_share_of_sms=reading.sm_activity_source != "utilization",
            sm_count=reading.device.sm_count,
            work={process: mine.functions for process, mine in counted.items()},
            busy_ns={process: ratio * interval_ns for process, ratio in busy.items()},
            sm_limits={p: member.sm_limit for p in counted if (member := self.members.get(p))},
            side_by_side=frozenset(p for p in counted if (p.tgid, device) in inputs.side_by_side),
            programs={
                p: member.process.command for p in counted if p not in on_many and (member := self.members.get(p))
            },
            deliveries=inputs.deliveries,
            on_many_devices=on_many,
        )

    def _unseen_on(self, inputs: TickInputs, device: DeviceUuid) -> list[ProcessId]:
        """Those that NVML lists there, and whose launches there are not seen: by no probe, or not on which device.

        What runs in the MPS server is its clients'.
        """
        listed = [process for tgid in inputs.tgids_on(device) if (process := inputs.by_tgid.get(tgid)) is not None]
        elsewhere = {p for p in self._deltas.unplaced_of if (p, device) not in self._deltas.placed}
        unseen = [process for process in listed if process not in inputs.probed or process in elsewhere]
        return [p for p in unseen if not (member := self.members.get(p)) or not member.is_mps_server]

    def _others(
        self, inputs: TickInputs, device: DeviceUuid, unseen: Collection[ProcessId], busy: float, interval_ns: int
    ) -> Unseen | None:
        """NVML's time of these and of all; None: no other process may work there.

        One may where NVML lists no processes at all, or one without a number here.
        """
        unknown = any(tgid not in inputs.by_tgid for tgid in inputs.tgids_on(device))
        if not (unseen or unknown or device not in inputs.listing):
            return None
        own_ns = {process: (inputs.utilization_of(process, device) or 0.0) * interval_ns for process in unseen}
        return Unseen(own_ns, busy * interval_ns)

    def _functions(self, attribution: Attribution, process: ProcessId, counted: CountedWork) -> list[FunctionWork]:
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


def _without_instances(parts: Sequence[DeviceTick]) -> list[DeviceTick]:
    """The same parts; that of a GPU with MIG instances without what they did."""
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


def _memory(
    reading: DeviceReading, inputs: TickInputs, counted: Mapping[ProcessId, CountedWork]
) -> dict[ProcessId, int]:
    """Each process's bytes: NVML's; where it has none, the process's claim, of what is left of the device's use."""
    device = reading.device.uuid
    by_nvml = {process: size for process in counted if (size := inputs.memory_of(process, device)) is not None}
    claims = {
        process: sum(size for kind, size in work.live_bytes.items() if kind != "pinned")
        for process, work in counted.items()
        if process not in by_nvml and work.live_bytes is not None
    }
    used = reading.memory_used_bytes
    return by_nvml | fitted(claims, None if used is None else used - sum(by_nvml.values()))


@dataclass(frozen=True, slots=True)
class _DeviceWork:
    """What processes did on one device in a tick."""

    reading: DeviceReading
    interval_ns: int
    inputs: TickInputs
    memory: Mapping[ProcessId, int]
    busy_ratio: float  # of all its processes together, by NVML
    counts_copies: bool
    unseen: Collection[ProcessId]  # whose launches are not seen here

    def of(self, member: GpuProcess, counted: CountedWork, estimate: Estimate | None) -> Work:
        """One process's work."""
        process, live = member.process.id, counted.live_bytes
        memory = self.memory.get(process)
        # Only NVML's share of time is known of its kernels.
        if self.interval_ns and (process in self.unseen or process not in self.inputs.probed):
            if estimate is not None:
                return Work(process, None, estimate.sm_ns, None, None, memory, sm_error_ns=estimate.error_ns)
            ratio = self._nvml_ratio(member)
            if ratio is None:
                return Work(process, None, None, None, None, memory)
            error_ns = poll_error(ratio, self.busy_ratio, self.interval_ns) * self.interval_ns
            return Work(process, None, ratio * self.interval_ns, None, None, memory, sm_error_ns=error_ns)
        work = Work(
            process,
            *(None, None, None, None),
            memory,
            memory_peak_bytes=counted.peak_bytes or None,
            memory_by_kind=live or {},
            memory_by_age=dict(zip(_AGES, counted.live_by_age, strict=False)),
        )
        if not self.interval_ns:
            return work
        estimate = estimate or Estimate(0.0, 0.0)
        return replace(
            work,
            launches=counted.kernels,
            sm_ns=estimate.sm_ns,
            pcie_tx_bytes=counted.pcie_tx_bytes if self.counts_copies else None,
            pcie_rx_bytes=counted.pcie_rx_bytes if self.counts_copies else None,
            peer_tx_bytes=counted.peer_tx_bytes,
            peer_rx_bytes=counted.peer_rx_bytes,
            sm_error_ns=estimate.error_ns,
            sm_bound_ns=estimate.bound_ns,
        )

    def _nvml_ratio(self, member: GpuProcess) -> float | None:
        """NVML's share of time; it leaves idle processes out. None on MIG, where it has no utilisation by process.

        Some drivers credit the MPS server with what its clients did: that is not the server's.
        """
        if member.is_mps_server:
            return 0.0
        device = self.reading.device
        if device.parent is not None:
            return None
        return self.inputs.utilization.get((member.process.id.tgid, device.uuid), 0.0)
