# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether a device is fit for offline work: a state machine per device, after MuxFlow's SysMonitor (arXiv 2303.13803).

Init → Healthy ⇄ Unhealthy → Overlimit → Disabled. Worse at once (Overlimit or a device that does not answer, which cost
work, after some patience), better only after a hold-off that doubles with each relapse and is forgotten slowly. Pure:
time and readings are arguments. Invariant: an unknown figure is beyond no bound.

`SysMonitor` owns the state of all devices of the node. A MIG instance is no better than its GPU. A device that left the
snapshot is forgotten; a lost one stays in it. There is one monitor for the agent's life: a new policy starts with what
is known of the devices, or their old XIDs would count as new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from agent.core.clock import NS_PER_SECOND
from agent.core.model import DeviceHealth, DeviceReading, DeviceUuid, Snapshot
from agent.nvml.xid import XidSeverity, meaning_of, severity_of
from enforce.model import Share
from enforce.policy.model import Bounds, HealthRule, Policy

_WORKING_RATIO = 0.2  # below it a low clock only means that the device is idle


class Condition(StrEnum):
    """What a device is fit for."""

    INIT = "init"  # not watched for long enough
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # offline work may stay, but not grow or begin
    OVERLIMIT = "overlimit"  # offline work has to go
    DISABLED = "disabled"  # broken: offline work has to go, and stays away until it has been clean for long


ORDER = (Condition.HEALTHY, Condition.INIT, Condition.UNHEALTHY, Condition.OVERLIMIT, Condition.DISABLED)


@dataclass(frozen=True, slots=True)
class HealthState:
    """What is kept of one device between steps."""

    condition: Condition = Condition.INIT
    since_ns: int | None = None  # in this condition; None: before the first step
    bad_since_ns: int | None = None  # over an overlimit bound without a break
    lost_since_ns: int | None = None  # not answering without a break
    hold_until_ns: int = 0  # not better before this
    relapses: int = 0
    forgiven_ns: int = 0  # when a relapse was last forgotten, or it last got better
    xids: Mapping[int, int] = field(default_factory=dict)  # counted so far
    reason: str = "not watched for long enough"


@dataclass(frozen=True, slots=True)
class HealthView:
    """What a device's health allows. The rest of enforcement sees this only."""

    state: Condition
    may_grow: bool  # the share of offline work may become larger
    may_start: bool  # offline work that is new here may have more than its floor
    must_leave: bool  # offline work has to go: the ladder's strongest rung that the policy lists
    reason: str
    since_ns: int
    hold_until_ns: int  # it does not become better before this


def view(state: HealthState) -> HealthView:
    """What the state allows."""
    return HealthView(
        state=state.condition,
        may_grow=state.condition is Condition.HEALTHY,
        may_start=state.condition is Condition.HEALTHY,
        must_leave=state.condition in (Condition.OVERLIMIT, Condition.DISABLED),
        reason=state.reason,
        since_ns=state.since_ns or 0,
        hold_until_ns=state.hold_until_ns,
    )


def limit(share: Share, health: HealthView | None, before_ratio: float | None, floor_ratio: float) -> Share:
    """A law's share under the device's health: a ceiling, never a raise, never below the floor.

    `before_ratio`: the container's share until now, None if it is new here. Of a container on several devices the
    worst health counts (`worst`).
    """
    if health is None or (health.may_grow and health.may_start and not health.must_leave):
        return share
    reason = f"{share.reason}; device {health.state}: {health.reason}"
    if health.must_leave:
        return replace(share, ratio=min(share.ratio, floor_ratio), reason=reason, exhausted=True)
    ceiling = before_ratio if before_ratio is not None else share.ratio if health.may_start else floor_ratio
    if health.may_grow or share.ratio <= ceiling:
        return replace(share, reason=reason)
    return replace(share, ratio=max(ceiling, min(share.ratio, floor_ratio)), reason=reason)


def worst(views: list[HealthView]) -> HealthView | None:
    """The one that allows least; None for none."""
    return max(views, key=lambda one: ORDER.index(one.state), default=None)


def step(state: HealthState, reading: DeviceReading, rule: HealthRule, now_ns: int) -> HealthState:
    """The state after one reading of the device. Idempotent for the same reading at the same time."""
    if state.since_ns is None:
        state = replace(state, since_ns=now_ns, forgiven_ns=now_ns)
    xid, state = _new_xid(state, reading)
    wanted, reason = _wanted(reading, rule, xid)
    fatal = xid is not None and severity_of(xid) is XidSeverity.FATAL
    over, lost = wanted is Condition.OVERLIMIT, wanted is Condition.DISABLED and not fatal
    bad_since, lost_since = _since(state.bad_since_ns, over, now_ns), _since(state.lost_since_ns, lost, now_ns)
    state = replace(state, bad_since_ns=bad_since, lost_since_ns=lost_since)
    since = bad_since if over else lost_since
    if since is not None and now_ns - since < rule.patience_ns:
        wanted = Condition.UNHEALTHY
    if wanted is not Condition.HEALTHY:
        return _bad(state, wanted, reason, rule, now_ns)
    return _good(state, rule, now_ns)


def _since(before_ns: int | None, holds: bool, now_ns: int) -> int | None:
    """Since when something holds without a break."""
    return (before_ns if before_ns is not None else now_ns) if holds else None


def _new_xid(state: HealthState, reading: DeviceReading) -> tuple[int | None, HealthState]:
    """The worst XID that was not there before. Counts that went back (another driver) are taken as they are, but not
    from a lost device, of which they may be missing."""
    new = [xid for xid, count in reading.xid_counts.items() if count > state.xids.get(xid, 0)]
    order = list(XidSeverity)
    worst_xid = max(new, key=lambda xid: (order.index(severity_of(xid)), xid), default=None)
    kept = state.xids if reading.lost else {}
    return worst_xid, replace(state, xids={**kept, **reading.xid_counts})


def _wanted(reading: DeviceReading, rule: HealthRule, xid: int | None) -> tuple[Condition, str]:
    """The condition by this reading alone, and why."""
    severity = severity_of(xid) if xid is not None else None
    if xid is not None and severity is XidSeverity.FATAL:
        return Condition.DISABLED, meaning_of(xid)
    if reading.lost:
        return Condition.DISABLED, "the GPU does not answer"
    if found := _beyond(reading, rule.overlimit):
        return Condition.OVERLIMIT, found
    if xid is not None and severity is XidSeverity.DEVICE:
        return Condition.UNHEALTHY, meaning_of(xid)
    if found := _beyond(reading, rule.unhealthy):
        return Condition.UNHEALTHY, found
    return Condition.HEALTHY, "within its bounds"


def _beyond(reading: DeviceReading, bounds: Bounds) -> str | None:
    """The first bound that the reading is known to be beyond."""
    activity, gpm = reading.sm_activity_ratio, reading.sm_activity_source == "gpm"
    ratios = (
        ("SM activity", activity if gpm else None, bounds.sm_activity_ratio),
        ("utilisation", None if gpm else activity, bounds.utilization_ratio),
        ("memory", reading.memory_used_ratio, bounds.memory_ratio),
    )
    for name, value, most in ratios:
        if value is not None and most is not None and value > most:
            return f"{name} {value:.0%} over {most:.0%}"
    clock, least = reading.sm_clock_hertz, bounds.sm_clock_hertz
    if clock is not None and least is not None and clock < least and (activity or 0.0) >= _WORKING_RATIO:
        return f"SM clock {clock / 1e6:.0f} MHz under {least / 1e6:.0f} MHz at work"
    return None


def _bad(state: HealthState, wanted: Condition, reason: str, rule: HealthRule, now_ns: int) -> HealthState:
    """The hold-off counts from the last moment that was as bad. Each time that it gets worse is a relapse."""
    change = ORDER.index(wanted) - ORDER.index(state.condition)
    if change < 0 and now_ns < state.hold_until_ns:
        return replace(state, forgiven_ns=now_ns)
    relapses = state.relapses + (change > 0)
    return replace(
        state,
        condition=wanted,
        since_ns=state.since_ns if change == 0 else now_ns,
        hold_until_ns=max(state.hold_until_ns, now_ns + _hold_ns(wanted, max(1, relapses), rule)),
        relapses=relapses,
        forgiven_ns=now_ns,
        reason=reason,
    )


def _good(state: HealthState, rule: HealthRule, now_ns: int) -> HealthState:
    """One step better at a time, when the hold-off is over."""
    if state.condition is Condition.HEALTHY:
        forget = state.relapses and now_ns - state.forgiven_ns >= rule.forgive_ns
        return replace(state, relapses=state.relapses - 1, forgiven_ns=now_ns) if forget else state
    if state.condition is Condition.INIT:
        waited = state.since_ns is not None and now_ns - state.since_ns >= rule.init_ns
        return _become(state, Condition.HEALTHY, "within its bounds", now_ns) if waited else state
    if now_ns < state.hold_until_ns:
        return state
    if state.condition is Condition.DISABLED:
        return _become(state, Condition.INIT, "clean again; watched", now_ns)
    return _become(state, Condition.HEALTHY, "within its bounds", now_ns)


def _become(state: HealthState, condition: Condition, reason: str, now_ns: int) -> HealthState:
    return replace(state, condition=condition, since_ns=now_ns, reason=reason, forgiven_ns=now_ns)


def _hold_ns(condition: Condition, relapses: int, rule: HealthRule) -> int:
    """Doubles with each relapse, up to the most; a disabled device stays so for `clean_ns` at least."""
    hold: int = min(rule.hold_off_most_ns, rule.hold_off_ns << min(relapses - 1, 40))
    return max(hold, rule.clean_ns) if condition is Condition.DISABLED else hold


class SysMonitor:
    """One state machine per device."""

    def __init__(self) -> None:
        self._states: dict[DeviceUuid, HealthState] = {}

    def look(self, snapshot: Snapshot, policy: Policy) -> dict[DeviceUuid, HealthView]:
        """The health of each device by this snapshot; cheap, and the same snapshot may be passed again.

        Time is the snapshot's: however long it is the latest one, it is one reading of the devices.
        """
        self._states = {
            reading.device.uuid: step(
                self._states.get(reading.device.uuid, HealthState()),
                reading,
                policy.health_of(reading.device),
                snapshot.at_ns,
            )
            for reading in snapshot.devices
        }
        return {reading.device.uuid: self._view(reading) for reading in snapshot.devices}

    def _view(self, reading: DeviceReading) -> HealthView:
        own = view(self._states[reading.device.uuid])
        parent = self._states.get(reading.device.parent) if reading.device.parent else None
        return (worst([own, view(parent)]) or own) if parent else own


def published(views: Mapping[DeviceUuid, HealthView], now_ns: int) -> dict[DeviceUuid, DeviceHealth]:
    """For the snapshot, the metrics and gputop."""
    return {
        uuid: DeviceHealth(
            state=one.state.value,
            reason=one.reason,
            seconds=max(0, now_ns - one.since_ns) / NS_PER_SECOND,
            hold_seconds=max(0, one.hold_until_ns - now_ns) / NS_PER_SECOND,
        )
        for uuid, one in views.items()
    }
