# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One decision for everybody: seats and readings → shares → levels. Pure but for the laws' states, which it returns.

Rules: the online container with the least slack rules its devices; an offline container is held only where an online
one is; what offline work may queue on a device is shared out among the offline processes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent.model import ContainerKey, DeviceUuid, ProcessId
from enforce.laws import law_of
from enforce.model import Level, OnlineOn, Reading, Share, Target
from enforce.planner import offline_level
from enforce.policy.model import OfflineRule, OnlineRule, Role, Tuning
from enforce.roster import Seat, target_of


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


def decide(
    seats: Mapping[ContainerKey, Seat],
    readings: Mapping[ContainerKey, Reading | None],
    states: Mapping[ContainerKey, Any],
    slots: Mapping[DeviceUuid, int],
    launch_ns: Mapping[ProcessId, float],
    tuning: Tuning,
    now_ns: int,
) -> Decided:
    """See the module."""
    online = [seat for seat in seats.values() if seat.classification.role is Role.ONLINE]
    offline = [seat for seat in seats.values() if seat.classification.role is Role.OFFLINE]
    verdicts = tuple(
        verdict for seat in offline if (verdict := _judge(seat, online, readings, states, tuning, now_ns)) is not None
    )
    levels = {target_of(member, slots, seat.devices): Level(online=True) for seat in online for member in seat.members}
    crowd = _crowd(verdicts)
    for verdict in verdicts:
        for member in verdict.seat.members:
            parts = max(crowd.get(device, 1) for device in verdict.seat.devices)
            target = target_of(member, slots, verdict.seat.devices)
            levels[target] = _part(verdict, parts, launch_ns.get(member.process.id))
    return Decided(verdicts, levels)


def _judge(
    seat: Seat,
    online: list[Seat],
    readings: Mapping[ContainerKey, Reading | None],
    states: Mapping[ContainerKey, Any],
    tuning: Tuning,
    now_ns: int,
) -> Verdict | None:
    rulers = [
        OnlineOn(
            other.container.key, next(iter(shared)), other.classification.rule.slo, readings.get(other.container.key)
        )
        for other in online
        if isinstance(other.classification.rule, OnlineRule) and (shared := other.devices & seat.devices)
    ]
    rule = seat.classification.rule
    if not rulers or not isinstance(rule, OfflineRule):
        return None
    ruler = min(rulers, key=_slack)
    law = law_of(rule, tuning)
    state = states.get(seat.container.key)
    state, share = law.step(law.start() if state is None else state, ruler.reading, ruler.slo, now_ns)
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


def _crowd(verdicts: tuple[Verdict, ...]) -> dict[DeviceUuid, int]:
    """Offline processes per device."""
    crowd: dict[DeviceUuid, int] = {}
    for verdict in verdicts:
        for device in verdict.seat.devices:
            crowd[device] = crowd.get(device, 0) + len(verdict.seat.members)
    return crowd


def _part(verdict: Verdict, parts: int, launch_ns: float | None) -> Level:
    level = offline_level(verdict.rule, verdict.share, launch_ns)
    return replace(level, share_ratio=level.share_ratio / parts, max_queued_ns=level.max_queued_ns // parts)
