# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The containers with a process on a GPU, classified by the policy, with the devices that they are on. Pure but for
the log.

A container that is left alone although its owner meant otherwise (two rules claim it, its annotations are wrong) is
logged once per reason; the same reason is in the snapshot, and so in `gputop` and `gpuwarden plan`. What is remembered
of that is bounded by the containers that are present.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import Container, ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.core.text import joined, printable
from agent.probes.abi import ORDINALS
from enforce.model import Subject, Target
from enforce.policy.annotations import classified
from enforce.policy.model import Classification, ContainerFacts, OfflineRule, Policy, ProcessFacts, Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Workload:
    """One container: its role by the policy, its processes on GPUs, and the devices that it can be on."""

    container: Container
    classification: Classification
    members: tuple[GpuProcess, ...]
    devices: frozenset[DeviceUuid]


def workloads_of(policy: Policy, members: Iterable[GpuProcess], snapshot: Snapshot) -> dict[ContainerKey, Workload]:
    """Classifies every container that has a process on a GPU."""
    grouped: dict[ContainerKey, list[GpuProcess]] = {}
    for member in members:
        grouped.setdefault(member.container.key, []).append(member)
    used = _devices_in_use(snapshot)
    return {key: _workload(policy, tuple(group), used.get(key, frozenset())) for key, group in grouped.items()}


def target_of(member: GpuProcess, slots: Mapping[DeviceUuid, int], devices: frozenset[DeviceUuid]) -> Target:
    """The kernel slots of a process's devices: by ordinal, and the only possible one where the ordinal is unknown."""
    by_ordinal = tuple(slots.get(device) for device in member.visible[:ORDINALS])
    possible = {slots[device] for device in (devices or member.visible) if device in slots}
    return Target(member.process.id, member.container.key, by_ordinal, possible.pop() if len(possible) == 1 else None)


def _workload(policy: Policy, members: tuple[GpuProcess, ...], used: frozenset[DeviceUuid]) -> Workload:
    container = members[0].container
    processes = tuple(ProcessFacts(member.process.user, member.process.command) for member in members)
    visible = frozenset(device for member in members for device in member.visible)
    return Workload(container, classified(policy, ContainerFacts(container, processes)), members, used or visible)


def _devices_in_use(snapshot: Snapshot) -> dict[ContainerKey, frozenset[DeviceUuid]]:
    return {
        row.container.key: frozenset(
            usage.device for usage in row.usage if usage.launches_per_second or usage.memory_bytes
        )
        for row in snapshot.containers
    }


def processes_of(workload: Workload) -> tuple[ProcessId, ...]:
    """The container's processes on a GPU."""
    return tuple(member.process.id for member in workload.members)


def subject_of(workload: Workload) -> Subject | None:
    """The container as a whole, for the rungs; None if it is not offline, and so must not be acted upon."""
    rule = workload.classification.rule
    if workload.classification.role is not Role.OFFLINE or not isinstance(rule, OfflineRule):
        return None
    return Subject(workload.container, processes_of(workload), workload.devices, rule)


def log_misconfigured(
    workloads: Mapping[ContainerKey, Workload], logged: Mapping[ContainerKey, str]
) -> dict[ContainerKey, str]:
    """Logs reasons that are not in `logged`; `logged` with them.

    A reason is kept until its container is gone, even if it no longer holds: one that comes and goes is logged once.
    """
    found = {key: one.classification.reason for key, one in workloads.items() if one.classification.misconfigured}
    for key, reason in found.items():
        if logged.get(key) != reason:
            container = workloads[key].container
            name = joined(container.namespace, container.pod, container.name)
            _log.warning("%s: %s", printable(name, 160), reason)
    return {key: reason for key, reason in {**logged, **found}.items() if key in workloads}
