# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From one tick's memory to limits for the kernel and acts on containers. Pure: state in, state out.

The kernel denies or holds what goes beyond a limit, so all that is left to do here is what was too much before: a
promise that came later than its memory, or an allocation that waited in vain. Only what lasts counts, and of the
containers on a device the fewest that make the room: those of the lowest weight, of these the youngest, for least work
is lost with them, of these the biggest. What was swapped out comes back when there has been room for it for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.model import ContainerKey, DeviceUuid
from enforce.memory.accounts import Overhead, Tenant, View

PATIENCE_NS = 3_000_000_000  # NVML is read once a second; less than this may be between two acts of somebody else
RESTORE_NS = 5_000_000_000
EASE = 1.05  # of what was swapped out: that much room, or it would have to go again at once
TOLERANCE_BYTES = 64 << 20
SWAP, EVICT = "swap", "evict"

LimitKey = tuple[ContainerKey | None, DeviceUuid]
"""None: of all offline containers together."""


@dataclass(frozen=True, slots=True)
class Act:
    """What is to be done to one container, or goes on being done."""

    rung: str
    device: DeviceUuid
    bytes: int  # that it held there
    reason: str
    since_ns: int
    room_since_ns: int | None = None  # since when it could be swapped in again


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered from one decision to the next."""

    at_ns: int = -1  # of the last snapshot
    overheads: Mapping[tuple[ContainerKey, DeviceUuid], Overhead] = field(default_factory=dict)
    short_since_ns: Mapping[DeviceUuid, int] = field(default_factory=dict)
    over_since_ns: Mapping[ContainerKey, int] = field(default_factory=dict)
    acts: Mapping[ContainerKey, Act] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits are of what the probes count."""

    limits: Mapping[LimitKey, int]
    acts: Mapping[ContainerKey, Act]


def plan(state: State, view: View, now_ns: int) -> tuple[State, Plan]:
    """One decision."""
    state = _observe(state, view)
    acts = _kept(state, view, now_ns)
    short = {device: state.short_since_ns.get(device, now_ns) for device in view.free_bytes if _lack(view, device) > 0}
    over = {one.container: state.over_since_ns.get(one.container, now_ns) for one in view.tenants if _excess(one)}
    for tenant in view.tenants:
        act = _for_itself(tenant, over, now_ns)
        if act is not None and tenant.container not in acts:
            acts[tenant.container] = act
    for device, since in list(short.items()):
        if now_ns - since >= PATIENCE_NS:
            acts |= _make_room(view, device, acts, now_ns)
            short[device] = now_ns  # what was done takes a while to show
    return replace(state, short_since_ns=short, over_since_ns=over, acts=acts), Plan(limits(state, view), acts)


def limits(state: State, view: View) -> dict[LimitKey, int]:
    """What each container, and all together, may have allocated on each device."""
    found: dict[LimitKey, int] = {}
    for tenant in view.tenants:
        if tenant.quota_bytes is not None:
            for device in tenant.holdings:
                overhead = state.overheads.get((tenant.container, device), Overhead())
                found[tenant.container, device] = max(0, tenant.quota_bytes - overhead.bytes)
    for device in view.free_bytes:
        room = view.room(device)
        if room is not None:
            live = sum(tenant.on(device).live_bytes for tenant in view.tenants)
            found[None, device] = max(0, live + room)
    return found


def victims(tenants: Iterable[Tenant], device: DeviceUuid, lack_bytes: int) -> tuple[Tenant, ...]:
    """The first ones of the order whose memory covers the lack, without those that it would be covered without."""
    order = sorted(tenants, key=lambda one: (one.weight, -one.started_ticks, -one.on(device).bytes, one.container))
    chosen: list[Tenant] = []
    for tenant in order:
        if sum(one.on(device).bytes for one in chosen) >= lack_bytes:
            break
        if tenant.on(device).bytes > 0:
            chosen.append(tenant)
    total = sum(one.on(device).bytes for one in chosen)
    for tenant in reversed(chosen.copy()):  # the most valuable first
        if total - tenant.on(device).bytes >= lack_bytes:
            chosen.remove(tenant)
            total -= tenant.on(device).bytes
    return tuple(chosen)


def _observe(state: State, view: View) -> State:
    if view.at_ns == state.at_ns:
        return state
    overheads = {
        (tenant.container, device): state.overheads.get((tenant.container, device), Overhead()).after(holding)
        for tenant in view.tenants
        for device, holding in tenant.holdings.items()
    }
    return replace(state, at_ns=view.at_ns, overheads=overheads)


def _lack(view: View, device: DeviceUuid) -> int:
    room = view.room(device)
    return 0 if room is None else max(0, -room)


def _excess(tenant: Tenant) -> bool:
    quota = tenant.quota_bytes
    return quota is not None and any(one.bytes > quota + TOLERANCE_BYTES for one in tenant.holdings.values())


def _kept(state: State, view: View, now_ns: int) -> dict[ContainerKey, Act]:
    """What goes on: an eviction until the container is gone, a swap until there has been room for a while."""
    kept = {}
    for tenant in view.tenants:
        act = state.acts.get(tenant.container)
        if act is None:
            continue
        room = view.room(act.device)
        has_room = act.rung == SWAP and (room is None or room >= act.bytes * EASE)
        since = (act.room_since_ns if act.room_since_ns is not None else now_ns) if has_room else None
        if since is None or now_ns - since < RESTORE_NS:
            kept[tenant.container] = replace(act, room_since_ns=since)
    return kept


def _for_itself(tenant: Tenant, over: Mapping[ContainerKey, int], now_ns: int) -> Act | None:
    """A container that is over its own quota, or waits in vain: to swap it out would only put that off."""
    device = max(tenant.holdings, key=lambda one: tenant.on(one).bytes, default=None)
    if EVICT not in tenant.rungs or device is None:
        return None
    held = tenant.on(device).bytes
    since = over.get(tenant.container)
    if since is not None and now_ns - since >= PATIENCE_NS:
        return Act(EVICT, device, held, f"holds {held} bytes, its quota is {tenant.quota_bytes}", now_ns)
    waiting = tenant.waiting_since_ns
    if waiting is not None and now_ns - waiting >= tenant.max_hold_ns:
        return Act(EVICT, device, held, "an allocation waited for memory as long as it may", now_ns)
    return None


def _make_room(
    view: View, device: DeviceUuid, acts: Mapping[ContainerKey, Act], now_ns: int
) -> dict[ContainerKey, Act]:
    """Acts beyond those under way, whose memory counts as free already while they are fresh."""
    coming = sum(act.bytes for act in acts.values() if act.device == device and now_ns - act.since_ns < PATIENCE_NS)
    lack = _lack(view, device) - coming
    able = [tenant for tenant in view.tenants if tenant.rungs and tenant.container not in acts]
    made = {}
    for tenant in victims(able, device, lack) if lack > 0 else ():
        rungs = [rung for rung in tenant.rungs if rung != SWAP or tenant.waiting_since_ns is None]
        if rungs:  # what is stopped at an allocation cannot swap itself out
            reason = f"{lack} bytes short of what online containers were promised"
            made[tenant.container] = Act(rungs[0], device, tenant.on(device).bytes, reason, now_ns)
    return made
