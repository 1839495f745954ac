# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One decision for everybody: what was seen → shares → levels. Pure but for the laws' states, which it returns.

Rules: the online container with the least slack rules its devices; an offline container is held only where an online
one is; what offline work may use of a device is split between the offline containers there by weight, and within a
container between its processes, so that what one does not want the others have. On several devices the strictest holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.model import ContainerKey, DeviceUuid, ProcessId
from enforce.fair import Claim, parts
from enforce.health import HealthView, limit, worst
from enforce.laws import law_of
from enforce.model import Level, OnlineOn, Reading, Share, Target
from enforce.planner import offline_level
from enforce.policy.model import OfflineRule, OnlineRule, Role, Tuning
from enforce.roster import Seat, target_of


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision is made from. What is missing in a mapping is unknown."""

    seats: Mapping[ContainerKey, Seat]
    readings: Mapping[ContainerKey, Reading | None]
    slots: Mapping[DeviceUuid, int]
    launch_ns: Mapping[ProcessId, float] = field(default_factory=dict)  # estimated GPU time of one launch
    wanted: Mapping[ProcessId, float] = field(default_factory=dict)  # share of a device that it would use unhindered
    busy: Mapping[DeviceUuid, float] = field(default_factory=dict)  # share of time that online requests run
    blocks: Mapping[DeviceUuid, int] = field(default_factory=dict)  # that online processes launched, ever
    health: Mapping[DeviceUuid, HealthView] = field(default_factory=dict)
    shares: Mapping[ContainerKey, float] = field(default_factory=dict)  # of offline containers, as decided last
    launching: Mapping[ProcessId, frozenset[DeviceUuid]] = field(default_factory=dict)  # where a process is at work


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided for one offline container. `ruler` is the online container that it is held for."""

    seat: Seat
    rule: OfflineRule
    ruler: OnlineOn
    share: Share
    state: Any  # the law's, for the next decision


@dataclass(frozen=True, slots=True)
class Decided:
    """The outcome of one decision."""

    verdicts: tuple[Verdict, ...]
    levels: dict[Target, Level]


def decide(seen: Seen, states: Mapping[ContainerKey, Any], tuning: Tuning, now_ns: int) -> Decided:
    """See the module. `states`: of the laws, by offline container, as the last decision returned them."""
    online = [seat for seat in seen.seats.values() if seat.classification.role is Role.ONLINE]
    offline = [seat for seat in seen.seats.values() if seat.classification.role is Role.OFFLINE]
    verdicts = tuple(
        verdict
        for seat in offline
        if (verdict := _judge(seat, online, seen, states.get(seat.container.key), tuning, now_ns)) is not None
    )
    levels = {
        target_of(member, seen.slots, seat.devices): Level(online=True) for seat in online for member in seat.members
    }
    split = _split(verdicts, seen)
    for verdict in verdicts:
        levels |= _levels(verdict, split, seen)
    return Decided(verdicts, levels)


def _judge(seat: Seat, online: list[Seat], seen: Seen, state: Any, tuning: Tuning, now_ns: int) -> Verdict | None:
    rulers = [
        OnlineOn(
            container=other.container.key,
            device=device,
            slo=other.classification.rule.slo,
            reading=seen.readings.get(other.container.key),
            busy_ratio=seen.busy.get(device),
            blocks_total=seen.blocks.get(device),
        )
        for other in online
        if isinstance(other.classification.rule, OnlineRule)
        for device in sorted(other.devices & seat.devices)
    ]
    rule = seat.classification.rule
    if not rulers or not isinstance(rule, OfflineRule):
        return None
    ruler = min(rulers, key=lambda one: (_slack(one), -(one.busy_ratio or 0.0)))
    law = law_of(rule, tuning)
    state, share = law.step(law.start() if state is None else state, ruler, now_ns)
    health = worst([seen.health[device] for device in sorted(seat.devices) if device in seen.health])
    share = limit(share, health, seen.shares.get(seat.container.key), rule.limits.floor_ratio)
    return Verdict(seat, rule, ruler, share, state)


def slack_ratio(reading: Reading | None, target_ns: int) -> float | None:
    """(target − latency) ÷ target, by the recent latency where there is one; None without a reading."""
    if reading is None:
        return None
    latency = reading.recent_ns if reading.recent_ns is not None else reading.latency_ns
    return None if latency is None else (target_ns - latency) / target_ns


def _slack(ruler: OnlineOn) -> float:
    slack = slack_ratio(ruler.reading, ruler.slo.target_ns)
    return 1.0 if slack is None else slack


def _split(verdicts: tuple[Verdict, ...], seen: Seen) -> dict[DeviceUuid, dict[ContainerKey, float]]:
    """Device → container → its part of what offline work may use there."""
    claims: dict[DeviceUuid, dict[ContainerKey, Claim]] = {}
    for verdict in verdicts:
        for device in verdict.seat.devices:
            wanted = sum(_wanted_on(device, verdict.seat, seen).values())
            ratio = min(1.0, wanted / verdict.share.ratio) if verdict.share.ratio > 0 else 1.0
            claims.setdefault(device, {})[verdict.seat.container.key] = Claim(verdict.rule.weight, ratio)
    return {device: parts(those) for device, those in claims.items()}


def _levels(
    verdict: Verdict, split: Mapping[DeviceUuid, Mapping[ContainerKey, float]], seen: Seen
) -> dict[Target, Level]:
    """The levels of the container's processes: on each device its part is split between those at work there."""
    fractions: dict[ProcessId, tuple[float, float]] = {}  # of the share, and of the container's part of it
    for device in sorted(verdict.seat.devices):
        part = split[device][verdict.seat.container.key]
        for process, inside in _inside(_wanted_on(device, verdict.seat, seen), verdict.share.ratio * part).items():
            fractions[process] = min(fractions.get(process, (1.0, 1.0)), (part * inside, inside))
    return {
        target_of(member, seen.slots, verdict.seat.devices): offline_level(
            verdict.rule,
            verdict.share,
            *fractions.get(member.process.id, (1.0, 1.0)),
            seen.launch_ns.get(member.process.id),
        )
        for member in verdict.seat.members
    }


def _wanted_on(device: DeviceUuid, seat: Seat, seen: Seen) -> dict[ProcessId, float]:
    """What each process at work there wants of it, 0–1; all where nobody knows, or while it is being stopped."""
    wanted = {}
    for member in seat.members:
        process = member.process.id
        at_work = seen.launching.get(process) or (frozenset(member.visible) & seat.devices) or seat.devices
        if device in at_work:
            ratio = seen.wanted.get(process, 1.0)
            wanted[process] = ratio / len(at_work) if ratio < 1 else 1.0
    return wanted


def _inside(wanted: Mapping[ProcessId, float], whole: float) -> dict[ProcessId, float]:
    """Fractions of the container's part, with a sum of 1."""
    given = parts({process: Claim(1.0, min(1.0, ratio / max(whole, 1e-9))) for process, ratio in wanted.items()})
    total = sum(given.values())
    return {process: part / total if total else 1.0 / len(given) for process, part in given.items()}
