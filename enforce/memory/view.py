# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A snapshot and the policy as the memory planner needs them, and its limits as the kernel does. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import ContainerKey, DeviceReading, DeviceUuid, ProcessId, Snapshot, Usage
from agent.probes.abi import DEVICE_UNKNOWN, ORDINALS
from enforce.memory.accounts import NO_MEMORY, DeviceMemory, MemoryClaim, MemoryTenant, MemoryView
from enforce.memory.planner import EVICT, LimitKey
from enforce.memory.quotas import AllocationRule, GroupQuota, GroupQuotaKey
from enforce.policy.model import OfflineRule, OnlineRule, Policy, Role
from enforce.workloads import Workload, processes_of, target_of

GRACE_NS = 5_000_000_000  # beyond its longest hold, for an eviction to come first
_AFTER_PAUSE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class OfflineStatus:
    """What is known of offline containers beside the snapshot."""

    rungs: Mapping[ContainerKey, tuple[str, ...]] = field(
        default_factory=dict
    )  # of swap and evict: those that can be done now
    waiting_since_ns: Mapping[ContainerKey, int] = field(default_factory=dict)
    acting: bool = True


def view_of(
    policy: Policy, snapshot: Snapshot, workloads: Mapping[ContainerKey, Workload], now: OfflineStatus
) -> MemoryView:
    """One tick."""
    usage = {row.container.key: {one.device: one for one in row.usage} for row in snapshot.containers}
    return MemoryView(
        at_ns=snapshot.at_ns,
        free_bytes={reading.device.uuid: _free(reading) for reading in snapshot.devices if not reading.lost},
        claims=tuple(claim for rule in policy.online for claim in _claims(rule, workloads, usage)),
        tenants=tuple(
            _tenant(workload, workload.classification.rule, usage.get(key, {}), now)
            for key, workload in workloads.items()
            if workload.classification.role is Role.OFFLINE and isinstance(workload.classification.rule, OfflineRule)
        ),
        acting=now.acting,
        holders=_holders(snapshot),
    )


def allocation_rules(
    view: MemoryView,
    workloads: Mapping[ContainerKey, Workload],
    limits: Mapping[LimitKey, int],
    slots: Mapping[DeviceUuid, int],
) -> dict[ProcessId, AllocationRule]:
    """The rules of the processes whose allocations are limited: those of containers that a limit is about."""
    rules = {}
    for tenant in view.tenants:
        workload = workloads[tenant.container]
        rule = workload.classification.rule
        limited = any(
            (container, device) in limits for device in tenant.holdings for container in (tenant.container, None)
        )
        if not limited or not isinstance(rule, OfflineRule) or not {"deny", "hold"} & set(rule.ladder):
            continue
        longest = tenant.max_hold_ns + (GRACE_NS if EVICT in tenant.rungs else 0)
        for member in workload.members:
            target = target_of(member, slots, workload.devices)
            rules[target.process] = AllocationRule(target, "deny" in rule.ladder, "hold" in rule.ladder, longest)
    return rules


def group_quotas(
    view: MemoryView,
    workloads: Mapping[ContainerKey, Workload],
    limits: Mapping[LimitKey, int],
    slots: Mapping[DeviceUuid, int],
) -> dict[GroupQuotaKey, GroupQuota]:
    """The limits, each with the processes that share it.

    What all offline containers may have together is about those that NVML lists: for what a process only claims,
    others are not refused. Until it is listed, its own container may have no more than there is room for.
    """
    found: dict[GroupQuotaKey, GroupQuota] = {}
    for (container, device), limit in (_newcomers_limits(view, workloads, limits) | dict(limits)).items():
        if device not in slots:
            continue
        tenants = [tenant for tenant in view.tenants if container in (None, tenant.container)]
        members, sizes = [], []
        for tenant in tenants:
            mine = [one for member in workloads[tenant.container].members for one in _ordinals(member, device)]
            if container is None:
                mine = [(process, ordinal) for process, ordinal in mine if process in view.holders.get(device, ())]
            members += mine
            # A container's bytes are not known by process here: if some do not fit, all of them count with these.
            sizes += [tenant.on(device).live_bytes // max(1, len(mine))] * len(mine)
        found[container, slots[device]] = GroupQuota(limit, tuple(members), tuple(sizes))
    return found


def _newcomers_limits(
    view: MemoryView, workloads: Mapping[ContainerKey, Workload], limits: Mapping[LimitKey, int]
) -> dict[LimitKey, int]:
    """Of containers without a quota that have a process which NVML does not list yet."""
    found: dict[LimitKey, int] = {}
    for tenant in view.tenants:
        members = {member.process.id for member in workloads[tenant.container].members}
        for device, holding in tenant.holdings.items():
            room = view.room(device) if (None, device) in limits else None
            if room is not None and members - view.holders.get(device, frozenset()):
                found[tenant.container, device] = holding.live_bytes + max(0, room)
    return found


def _ordinals(member: GpuProcess, device: DeviceUuid) -> Iterator[tuple[ProcessId, int]]:
    """A process's own ordinals of a device; also of allocations on an unknown device, if it can only be this one."""
    for ordinal, visible in enumerate(member.visible[:ORDINALS]):
        if visible == device:
            yield member.process.id, ordinal
    if set(member.visible) == {device}:
        yield member.process.id, DEVICE_UNKNOWN


def _holders(snapshot: Snapshot) -> dict[DeviceUuid, frozenset[ProcessId]]:
    """The processes whose memory on each device is known: NVML lists them there, or cannot say."""
    found: dict[DeviceUuid, set[ProcessId]] = {}
    for row in snapshot.processes:
        for usage in row.usage:
            if usage.memory_bytes is not None:
                found.setdefault(usage.device, set()).add(row.process.id)
    return {device: frozenset(processes) for device, processes in found.items()}


def _free(reading: DeviceReading) -> int | None:
    total, used = reading.device.memory_total_bytes, reading.memory_used_bytes
    if total is None or used is None:
        return None
    return max(0, total - used - (reading.memory_reserved_bytes or 0))


def _claims(
    rule: OnlineRule,
    workloads: Mapping[ContainerKey, Workload],
    usage: Mapping[ContainerKey, Mapping[DeviceUuid, Usage]],
) -> Iterator[MemoryClaim]:
    if rule.reserve_bytes is None:
        return
    mine = [
        workload
        for workload in workloads.values()
        if workload.classification.role is Role.ONLINE and workload.classification.rule == rule
    ]
    for workload in mine:
        key = workload.container.key
        held = {device: _device_memory(usage.get(key, {}).get(device)).bytes for device in workload.devices}
        yield MemoryClaim(rule.name, rule.reserve_bytes, key, held)
    if not mine:
        yield MemoryClaim(rule.name, rule.reserve_bytes, None, {})


def _tenant(
    workload: Workload, rule: OfflineRule, usage: Mapping[DeviceUuid, Usage], now: OfflineStatus
) -> MemoryTenant:
    key = workload.container.key
    return MemoryTenant(
        container=key,
        quota_bytes=rule.limits.memory_bytes,
        weight=rule.weight,
        started_ticks=min(member.process.id.start_ticks for member in workload.members),
        holdings={device: _device_memory(usage.get(device)) for device in workload.devices},
        rungs=now.rungs.get(key, ()),
        max_hold_ns=max(rule.limits.max_hold_ns, rule.limits.max_pause_ns + _AFTER_PAUSE_NS),
        waiting_since_ns=now.waiting_since_ns.get(key),
        processes=frozenset(processes_of(workload)),
    )


def _device_memory(usage: Usage | None) -> DeviceMemory:
    if usage is None:
        return NO_MEMORY
    live = sum(size for kind, size in usage.memory_by_kind.items() if kind != "pinned")
    return DeviceMemory(usage.memory_bytes, live, "pool" in usage.memory_by_kind)
