# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process did on each device in a tick, out of everything that was seen.

Owns what goes on from tick to tick: previous counts, learned durations, what could not be placed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from agent.attribution import Attribution, Work, attribute, without_instances
from agent.evidence import Evidence
from agent.function_names import FunctionNames
from agent.function_times import FunctionTimes, observe_all
from agent.kernels import FunctionWork, weights
from agent.members import Member, Members
from agent.model import DeviceReading, DeviceUuid, ProcessId
from agent.ordinals import device_of
from agent.samples import AGES_SECONDS, Sample
from agent.sm_time import Estimate, SmTime
from agent.sm_work import Tick
from agent.tally import Counted, Owner, ResolveDevice, Tally

_MPS_SERVER = "nvidia-cuda-mps-server"
_AGES = (*(f"under_{seconds}_seconds" for seconds in AGES_SECONDS), "older")


@dataclass(frozen=True, slots=True)
class Part:
    """One device's tick."""

    attribution: Attribution
    work: Sequence[Work]
    functions: Mapping[ProcessId, Sequence[FunctionWork]]


@dataclass(slots=True)
class Accounts:
    """See the module."""

    members: Members
    names: FunctionNames
    _tally: Tally = field(default_factory=Tally)
    _times: FunctionTimes = field(default_factory=FunctionTimes)
    _sm_time: dict[DeviceUuid, SmTime] = field(default_factory=dict)
    _orphaned: int = 0
    _unread: int = 0

    def tick(self, samples: Sequence[Sample], evidence: Evidence, interval_ns: int) -> list[Part]:
        """One part per device that was read. MIG: what instances did is not in their GPU's."""
        observe_all(self._times, evidence.deliveries)
        counted = self._tally.tick(samples, self._resolver(evidence))
        if present := {reading.device.uuid for reading in evidence.readings}:
            self._sm_time = {device: known for device, known in self._sm_time.items() if device in present}
        return _on_the_whole(self._parts(interval_ns, evidence, counted))

    def lost(self) -> dict[str, int]:
        """What was counted and belongs to nobody, since start."""
        return {
            "counts:implausible": self._tally.implausible,
            "launches:no_device": self._tally.unplaced,
            "launches:no_container": self._orphaned,
            "launches:no_reading": self._unread,
        }

    def forget(self, processes: Collection[ProcessId]) -> None:
        """They are gone."""
        self._tally.forget(processes)
        self._times.forget(processes)
        for sm_time in self._sm_time.values():
            sm_time.forget(processes)

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

    def _parts(self, interval_ns: int, evidence: Evidence, counted: Mapping[Owner, Counted]) -> list[Part]:
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
    ) -> Part:
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
        return Part(attribution, work, functions)

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


def _on_the_whole(parts: Sequence[Part]) -> list[Part]:
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
