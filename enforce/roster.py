# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who is who now: the agent's members, classified by the policy, with the devices that they are on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.layout import ORDINALS
from agent.members import Member
from agent.model import Container, ContainerKey, DeviceUuid, ProcessId, Snapshot
from enforce.model import Subject, Target
from enforce.policy.annotations import classified
from enforce.policy.model import Classification, Facts, OfflineRule, Policy, ProcessFacts, Role


@dataclass(frozen=True, slots=True)
class Seat:
    """One container: what it is to the policy, its processes, and the devices that it can be on."""

    container: Container
    classification: Classification
    members: tuple[Member, ...]
    devices: frozenset[DeviceUuid]


def seats(policy: Policy, members: Iterable[Member], snapshot: Snapshot) -> dict[ContainerKey, Seat]:
    """Classifies every container that has a process on a GPU."""
    grouped: dict[ContainerKey, list[Member]] = {}
    for member in members:
        grouped.setdefault(member.container.key, []).append(member)
    used = _devices_in_use(snapshot)
    return {key: _seat(policy, tuple(group), used.get(key, frozenset())) for key, group in grouped.items()}


def target_of(member: Member, slots: Mapping[DeviceUuid, int], devices: frozenset[DeviceUuid]) -> Target:
    """How the kernel finds a process's devices: by ordinal, or the only one that it can be where that is unknown."""
    by_ordinal = tuple(slots.get(device) for device in member.visible[:ORDINALS])
    possible = {slots[device] for device in (devices or member.visible) if device in slots}
    return Target(member.process.id, member.container.key, by_ordinal, possible.pop() if len(possible) == 1 else None)


def _seat(policy: Policy, members: tuple[Member, ...], used: frozenset[DeviceUuid]) -> Seat:
    container = members[0].container
    processes = tuple(ProcessFacts(member.process.user, member.process.command) for member in members)
    visible = frozenset(device for member in members for device in member.visible)
    return Seat(container, classified(policy, Facts(container, processes)), members, used or visible)


def _devices_in_use(snapshot: Snapshot) -> dict[ContainerKey, frozenset[DeviceUuid]]:
    return {
        row.container.key: frozenset(
            usage.device for usage in row.usage if usage.launches_per_second or usage.memory_bytes
        )
        for row in snapshot.containers
    }


def processes_of(seat: Seat) -> tuple[ProcessId, ...]:
    """The container's processes on a GPU."""
    return tuple(member.process.id for member in seat.members)


def subject_of(seat: Seat) -> Subject | None:
    """The container as a whole, for the rungs; None for whoever is not offline, and is not to be acted upon."""
    rule = seat.classification.rule
    if seat.classification.role is not Role.OFFLINE or not isinstance(rule, OfflineRule):
        return None
    return Subject(seat.container, processes_of(seat), seat.devices, rule)
