# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From one tick's memory to limits for the kernel and acts on containers. Pure: state in, state out.

The kernel denies or holds what goes beyond a limit, so what is left to do here is what was too much before: a reserve
that came later than its memory was used, or an allocation that waited and got nothing. Only what lasts counts. Of the
containers on a device the fewest that make the room are chosen: those of the lowest weight, of these the youngest, as
least work is lost with them, of these the biggest. A swapped container comes back when there has been room for it for a
while, on all of its devices and beside the others that come back. One that cannot be swapped out is passed over for a
while: others make the room, or it is evicted. An eviction is about the processes that were there, not about those that
were started in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from agent.core.model import ContainerKey, DeviceUuid, ProcessId
from enforce.memory.accounts import MemoryTenant, MemoryView, Overhead

LASTING_NS = 3_000_000_000  # NVML is read once a second; a shorter lack may lie between two acts of other programs
RESTORE_NS = 5_000_000_000
SHUN_NS = 60_000_000_000  # before a swap that failed is tried again
EASE = 1.05  # of what was swapped out: that much room, or it would have to go again at once
TOLERANCE_BYTES = 64 << 20
SWAP, EVICT = "swap", "evict"

LimitKey = tuple[ContainerKey | None, DeviceUuid]
"""None: of all offline containers together."""


@dataclass(frozen=True, slots=True)
class PlannedAct:
    """What is to be done to one container, or is in force."""

    rung: str
    device: DeviceUuid
    held_bytes: Mapping[DeviceUuid, int]  # on each of its devices
    processes: frozenset[ProcessId]  # that it had
    reason: str
    since_ns: int
    room_since_ns: int | None = None  # since when it could be swapped in again


@dataclass(frozen=True, slots=True)
class MemoryPlanState:
    """What is remembered from one decision to the next."""

    at_ns: int = -1  # of the last snapshot
    overheads: Mapping[tuple[ContainerKey, DeviceUuid], Overhead] = field(default_factory=dict)
    short_since_ns: Mapping[DeviceUuid, int] = field(default_factory=dict)
    over_since_ns: Mapping[ContainerKey, int] = field(default_factory=dict)
    acts: Mapping[ContainerKey, PlannedAct] = field(default_factory=dict)
    shunned_since_ns: Mapping[ContainerKey, int] = field(default_factory=dict)  # when its swap failed


@dataclass(frozen=True, slots=True)
class Plan:
    """Limits in bytes as the probes count them, and acts."""

    limits: Mapping[LimitKey, int]
    acts: Mapping[ContainerKey, PlannedAct]


def plan(state: MemoryPlanState, view: MemoryView, now_ns: int) -> tuple[MemoryPlanState, Plan]:
    """One decision."""
    state = _settle(_observe(state, view), view, now_ns)
    acts = _kept(state, view, now_ns)
    short = {device: state.short_since_ns.get(device, now_ns) for device in view.free_bytes if _lack(view, device) > 0}
    over = {one.container: state.over_since_ns.get(one.container, now_ns) for one in view.tenants if _excess(one)}
    for tenant in view.tenants:
        act = _for_itself(tenant, over, now_ns)
        if act is not None and tenant.container not in acts:
            acts[tenant.container] = act
    for device, since in list(short.items()):
        if now_ns - since >= LASTING_NS:
            acts |= _make_room(state, view, device, acts, now_ns)
            short[device] = now_ns  # what was done takes a while to show
    return replace(state, short_since_ns=short, over_since_ns=over, acts=acts), Plan(limits(state, view), acts)


def limits(state: MemoryPlanState, view: MemoryView) -> dict[LimitKey, int]:
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


def victims(tenants: Iterable[MemoryTenant], device: DeviceUuid, lack_bytes: int) -> tuple[MemoryTenant, ...]:
    """The first of the order whose memory covers the lack, without those that are not needed for it."""
    order = sorted(tenants, key=lambda one: (one.weight, -one.started_ticks, -one.on(device).bytes, one.container))
    chosen: list[MemoryTenant] = []
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


def _observe(state: MemoryPlanState, view: MemoryView) -> MemoryPlanState:
    if view.at_ns == state.at_ns:
        return state
    overheads = {
        (tenant.container, device): state.overheads.get((tenant.container, device), Overhead()).after(holding)
        for tenant in view.tenants
        for device, holding in tenant.holdings.items()
    }
    return replace(state, at_ns=view.at_ns, overheads=overheads)


def _lack(view: MemoryView, device: DeviceUuid) -> int:
    room = view.room(device)
    return 0 if room is None else max(0, -room)


def _excess(tenant: MemoryTenant) -> bool:
    quota = tenant.quota_bytes
    return quota is not None and any(one.bytes > quota + TOLERANCE_BYTES for one in tenant.holdings.values())


def _settle(state: MemoryPlanState, view: MemoryView, now_ns: int) -> MemoryPlanState:
    """Without the acts that are over or have failed. For a failed swap others are chosen at once."""
    acts, short, over = dict(state.acts), dict(state.short_since_ns), dict(state.over_since_ns)
    shunned = {key: since for key, since in state.shunned_since_ns.items() if now_ns - since < SHUN_NS}
    for tenant in view.tenants:
        act = acts.get(tenant.container)
        if act is None:
            continue
        if act.rung == SWAP and SWAP not in tenant.rungs:
            shunned[tenant.container] = now_ns
            if act.device in short:
                short[act.device] = now_ns - LASTING_NS  # the time for it has passed
        elif act.rung == EVICT and act.processes.isdisjoint(tenant.processes):
            over.pop(tenant.container, None)  # NVML's figures may still be of those that ended
            if act.device in short:
                short[act.device] = now_ns
        else:
            continue
        del acts[tenant.container]
    return replace(state, acts=acts, short_since_ns=short, over_since_ns=over, shunned_since_ns=shunned)


def _kept(state: MemoryPlanState, view: MemoryView, now_ns: int) -> dict[ContainerKey, PlannedAct]:
    """The acts that stay: an eviction until the container is gone, a swap until there has been room for a while."""
    kept = {}
    given: dict[DeviceUuid, float] = {}  # to those that come back before, the most valuable first
    for tenant in sorted(view.tenants, key=lambda one: (-one.weight, one.started_ticks, one.container)):
        act = state.acts.get(tenant.container)
        if act is None:
            continue
        has_room = act.rung == SWAP and _fits(state, view, act, given)
        since = (act.room_since_ns if act.room_since_ns is not None else now_ns) if has_room else None
        if has_room:
            given |= {device: given.get(device, 0) + held * EASE for device, held in act.held_bytes.items()}
        if since is None or now_ns - since < RESTORE_NS:
            kept[tenant.container] = replace(act, room_since_ns=since)
    return kept


def _fits(state: MemoryPlanState, view: MemoryView, act: PlannedAct, given: Mapping[DeviceUuid, float]) -> bool:
    """Whether all that it held has room, beside what others get back."""
    for device, held in act.held_bytes.items():
        room = view.room(device)
        if room is not None and room + _hypothetical(view, device, state.acts) - given.get(device, 0) < held * EASE:
            return False
    return True


def _hypothetical(view: MemoryView, device: DeviceUuid, acts: Mapping[ContainerKey, PlannedAct]) -> int:
    """What would be free by now if the acts were carried out."""
    return 0 if view.acting else sum(act.held_bytes.get(device, 0) for act in acts.values())


def _for_itself(tenant: MemoryTenant, over: Mapping[ContainerKey, int], now_ns: int) -> PlannedAct | None:
    """Evicts a container that is over its own quota, or waits and gets nothing: a swap would only put that off."""
    device = max(tenant.holdings, key=lambda one: tenant.on(one).bytes, default=None)
    if EVICT not in tenant.rungs or device is None:
        return None
    since = over.get(tenant.container)
    if since is not None and now_ns - since >= LASTING_NS:
        held = tenant.on(device).bytes
        return _act(EVICT, tenant, device, f"holds {held} bytes, its quota is {tenant.quota_bytes}", now_ns)
    waiting = tenant.waiting_since_ns
    if waiting is not None and now_ns - waiting >= tenant.max_hold_ns:
        return _act(EVICT, tenant, device, "an allocation waited for memory as long as it may", now_ns)
    return None


def _make_room(
    state: MemoryPlanState, view: MemoryView, device: DeviceUuid, acts: Mapping[ContainerKey, PlannedAct], now_ns: int
) -> dict[ContainerKey, PlannedAct]:
    """Acts beyond those under way, whose memory counts as free already while they are fresh."""
    fresh = {key: act for key, act in acts.items() if not view.acting or now_ns - act.since_ns < LASTING_NS}
    lack = _lack(view, device) - sum(act.held_bytes.get(device, 0) for act in fresh.values())
    able = [tenant for tenant in view.tenants if _rungs(state, tenant) and tenant.container not in acts]
    made = {}
    for tenant in victims(able, device, lack) if lack > 0 else ():
        reason = f"{lack} bytes short of what is reserved for online containers"
        if tenant.container in state.shunned_since_ns:
            reason += "; it could not be swapped out"
        made[tenant.container] = _act(_rungs(state, tenant)[0], tenant, device, reason, now_ns)
    return made


def _rungs(state: MemoryPlanState, tenant: MemoryTenant) -> list[str]:
    """The rungs that can make room. A process that is stopped at an allocation cannot be swapped out."""
    no_swap = tenant.waiting_since_ns is not None or tenant.container in state.shunned_since_ns
    return [rung for rung in tenant.rungs if rung != SWAP or not no_swap]


def _act(rung: str, tenant: MemoryTenant, device: DeviceUuid, reason: str, now_ns: int) -> PlannedAct:
    held = {one: holding.bytes for one, holding in tenant.holdings.items() if holding.bytes > 0}
    return PlannedAct(rung, device, held, tenant.processes, reason, now_ns)
