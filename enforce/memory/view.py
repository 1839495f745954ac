# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A snapshot and the policy as the memory planner sees them, and its limits as the kernel does. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agent.layout import DEVICE_UNKNOWN, ORDINALS
from agent.members import Member
from agent.model import ContainerKey, DeviceReading, DeviceUuid, ProcessId, Snapshot, Usage
from enforce.memory.accounts import NOTHING, Claim, Holding, Tenant, View
from enforce.memory.bounds import Allowance, AllowanceKey, Bound
from enforce.memory.planner import EVICT, LimitKey
from enforce.policy.model import OfflineRule, OnlineRule, Policy, Role
from enforce.roster import Seat, processes_of, target_of

GRACE_NS = 5_000_000_000  # beyond its longest hold, for an eviction to come first
_AFTER_PAUSE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Now:
    """What is known of offline containers besides the snapshot."""

    rungs: Mapping[ContainerKey, tuple[str, ...]] = field(default_factory=dict)  # of swap and evict: what can be done
    waiting_since_ns: Mapping[ContainerKey, int] = field(default_factory=dict)
    acting: bool = True


def view_of(policy: Policy, snapshot: Snapshot, here: Mapping[ContainerKey, Seat], now: Now) -> View:
    """One tick."""
    usage = {row.container.key: {one.device: one for one in row.usage} for row in snapshot.containers}
    return View(
        at_ns=snapshot.at_ns,
        free_bytes={reading.device.uuid: _free(reading) for reading in snapshot.devices if not reading.lost},
        claims=tuple(claim for rule in policy.online for claim in _claims(rule, here, usage)),
        tenants=tuple(
            _tenant(seat, seat.classification.rule, usage.get(key, {}), now)
            for key, seat in here.items()
            if seat.classification.role is Role.OFFLINE and isinstance(seat.classification.rule, OfflineRule)
        ),
        acting=now.acting,
    )


def bounds_of(
    view: View, here: Mapping[ContainerKey, Seat], limits: Mapping[LimitKey, int], slots: Mapping[DeviceUuid, int]
) -> dict[ProcessId, Bound]:
    """Whose allocations the kernel is to look at: of containers that a limit is about."""
    bounds = {}
    for tenant in view.tenants:
        seat = here[tenant.container]
        rule = seat.classification.rule
        limited = any((who, device) in limits for device in tenant.holdings for who in (tenant.container, None))
        if not limited or not isinstance(rule, OfflineRule) or not {"deny", "hold"} & set(rule.ladder):
            continue
        longest = tenant.max_hold_ns + (GRACE_NS if EVICT in tenant.rungs else 0)
        for member in seat.members:
            target = target_of(member, slots, seat.devices)
            bounds[target.process] = Bound(target, "deny" in rule.ladder, "hold" in rule.ladder, longest)
    return bounds


def allowances_of(
    view: View, here: Mapping[ContainerKey, Seat], limits: Mapping[LimitKey, int], slots: Mapping[DeviceUuid, int]
) -> dict[AllowanceKey, Allowance]:
    """The limits with whom each is about."""
    found: dict[AllowanceKey, Allowance] = {}
    for (container, device), limit in limits.items():
        if device not in slots:
            continue
        tenants = [tenant for tenant in view.tenants if container in (None, tenant.container)]
        members, sizes = [], []
        for tenant in tenants:
            mine = [one for member in here[tenant.container].members for one in _numbers(member, device)]
            members += mine
            # A container's bytes are not known by process here: if some do not fit, all of them count with these.
            sizes += [tenant.on(device).live_bytes // max(1, len(mine))] * len(mine)
        found[container, slots[device]] = Allowance(limit, tuple(members), tuple(sizes))
    return found


def _numbers(member: Member, device: DeviceUuid) -> Iterator[tuple[ProcessId, int]]:
    """A process's own numbers of a device; what it did on one that is not known, if it can only be this."""
    for ordinal, visible in enumerate(member.visible[:ORDINALS]):
        if visible == device:
            yield member.process.id, ordinal
    if set(member.visible) == {device}:
        yield member.process.id, DEVICE_UNKNOWN


def _free(reading: DeviceReading) -> int | None:
    total, used = reading.device.memory_total_bytes, reading.memory_used_bytes
    if total is None or used is None:
        return None
    return max(0, total - used - (reading.memory_reserved_bytes or 0))


def _claims(
    rule: OnlineRule, here: Mapping[ContainerKey, Seat], usage: Mapping[ContainerKey, Mapping[DeviceUuid, Usage]]
) -> Iterator[Claim]:
    if rule.reserve_bytes is None:
        return
    mine = [
        seat for seat in here.values() if seat.classification.role is Role.ONLINE and seat.classification.rule == rule
    ]
    for seat in mine:
        key = seat.container.key
        held = {device: _holding(usage.get(key, {}).get(device)).bytes for device in seat.devices}
        yield Claim(rule.name, rule.reserve_bytes, key, held)
    if not mine:
        yield Claim(rule.name, rule.reserve_bytes, None, {})


def _tenant(seat: Seat, rule: OfflineRule, usage: Mapping[DeviceUuid, Usage], now: Now) -> Tenant:
    key = seat.container.key
    return Tenant(
        container=key,
        quota_bytes=rule.limits.memory_bytes,
        weight=rule.weight,
        started_ticks=min(member.process.id.start_ticks for member in seat.members),
        holdings={device: _holding(usage.get(device)) for device in seat.devices},
        rungs=now.rungs.get(key, ()),
        max_hold_ns=max(rule.limits.max_hold_ns, rule.limits.max_pause_ns + _AFTER_PAUSE_NS),
        waiting_since_ns=now.waiting_since_ns.get(key),
        processes=frozenset(processes_of(seat)),
    )


def _holding(usage: Usage | None) -> Holding:
    if usage is None:
        return NOTHING
    live = sum(size for kind, size in usage.memory_by_kind.items() if kind != "pinned")
    return Holding(usage.memory_bytes, live, "pool" in usage.memory_by_kind)
