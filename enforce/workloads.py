# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The containers with a process on a GPU, classified by the policy, with the devices that they are on. Pure but for
the log.

A container that is left alone although its owner meant otherwise (two rules claim it, its annotations are wrong) is
logged once per reason; the same reason is in the snapshot, and so in `gputop` and `gpuwarden plan`. What is remembered
of that is bounded by the containers that are present.

A container that is in an offline rule stays in it (`Memberships`) for as long as a process lives that put it there,
whatever that process or another one of the container calls itself later: a command line is the tenant's own. Whatever
leaves a rule is counted and logged with the reason.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.containers.gpu_processes import GpuProcess
from agent.core.model import HOST, Container, ContainerKey, DeviceUuid, ProcessId, Snapshot
from agent.core.text import joined, printable
from agent.probes.abi import ORDINALS
from enforce.model import Subject, Target
from enforce.policy.annotations import classified
from enforce.policy.model import Classification, ContainerFacts, OfflineRule, Policy, ProcessFacts, Role, Rule

_log = logging.getLogger(__name__)
_MOST = 4096
REASONS = (
    "processes",
    "names",
    "policy",
    "mixed",
)  # what changed; mixed: only some processes match, so it never entered
_MOST_PROCESSES = 64  # of a container, that are looked at one by one


@dataclass(frozen=True, slots=True)
class _Membership:
    """The rule that a container is in, and the facts that put it there."""

    policy: Policy
    container: Container
    found: Classification
    processes: Mapping[ProcessId, ProcessFacts]


class Memberships:
    """The rule of each container, kept over reloads of the policy. For one thread at a time; bounded."""

    def __init__(self) -> None:
        self._known: OrderedDict[ContainerKey, _Membership] = OrderedDict()
        self._mixed: dict[ContainerKey, str] = {}  # the rule that it would be in
        self.left: dict[tuple[str, str], int] = {}  # (rule, reason) → containers that left it, or were kept out

    def begin(self, policy: Policy) -> None:
        """A policy comes into force: its rules' counts begin at 0, so that the first one that leaves is seen."""
        rules: tuple[Rule, ...] = (*policy.online, *policy.offline, *policy.periodic)
        names = [rule.name for rule in rules]
        self.left = {(name, why): 0 for name in names for why in REASONS} | {k: n for k, n in self.left.items() if n}

    def classify(self, policy: Policy, container: Container, members: Iterable[GpuProcess]) -> Classification:
        """The container's role, by the policy and by the rule that it is in."""
        processes = {one.process.id: ProcessFacts(one.process.user, one.process.command) for one in members}
        now = _classified(policy, container, processes.values())
        before = self._known.get(container.key)
        if before is not None and not _same_rule(before.found, now):
            alive = {process: facts for process, facts in before.processes.items() if process in processes}
            stays = _stays(policy, container, replace(before, processes=alive))
            if stays is not None:
                others = {one: facts for one, facts in processes.items() if one not in alive}
                more = {one: f for one, f in others.items() if _same_rule(_classified(policy, container, [f]), stays)}
                now, processes = _kept(stays, len(others) - len(more)), {**alive, **more}
            elif alive or container.key != HOST:  # else its processes ended: the others there are of other owners
                self._count(policy, container, before, now)
        if now.rule is None and not now.misconfigured and container.key != HOST:
            now = self._kept_out(policy, container, now, processes)
        self._remember(_Membership(policy, container, now, processes))
        return now

    def _kept_out(
        self, policy: Policy, container: Container, now: Classification, processes: Mapping[ProcessId, ProcessFacts]
    ) -> Classification:
        """The same role; where a process alone would be in an offline rule, with that for a reason, and counted."""
        about_processes = any(rule.match.command or rule.match.user for rule in policy.offline)
        if not about_processes or now.role is not Role.UNMATCHED or len(processes) < 2:
            return now
        for facts in list(processes.values())[:_MOST_PROCESSES]:
            alone = _classified(policy, container, [facts])
            if alone.role is Role.OFFLINE and alone.rule is not None:
                rule = alone.rule.name
                if self._mixed.get(container.key) != rule:
                    self._mixed[container.key] = rule
                    self.left[rule, "mixed"] = self.left.get((rule, "mixed"), 0) + 1
                    if len(self._mixed) > _MOST:
                        self._mixed.pop(next(iter(self._mixed)))
                return replace(
                    now, reason=f"rule {rule} matches not all of its processes: left alone", misconfigured=True
                )
        return now

    def _count(self, policy: Policy, container: Container, before: _Membership, now: Classification) -> None:
        rule = before.found.rule.name if before.found.rule else ""
        if before.policy != policy:
            why = "policy"
        else:
            why = "names" if before.container != container else "processes"
        if (rule, why) in self.left or len(self.left) < _MOST:
            self.left[rule, why] = self.left.get((rule, why), 0) + 1
        name = printable(joined(container.namespace, container.pod, container.name), 160)
        _log.warning("%s left rule %s, as its %s changed: it is %s now (%s)", name, rule, why, now.role, now.reason)

    def _remember(self, now: _Membership) -> None:
        """Also of a container without a process on a GPU: it may come back under another name."""
        key = now.container.key
        self._known.pop(key, None)
        if now.found.rule is not None:
            self._known[key] = now
            if len(self._known) > _MOST:
                self._known.popitem(last=False)


def _classified(policy: Policy, container: Container, processes: Iterable[ProcessFacts]) -> Classification:
    return classified(policy, ContainerFacts(container, tuple(processes)))


def _same_rule(one: Classification, other: Classification) -> bool:
    mine, others = one.rule, other.rule
    return one.role is other.role and (mine.name if mine else None) == (others.name if others else None)


def _stays(policy: Policy, container: Container, before: _Membership) -> Classification | None:
    """The role that the container keeps by the processes that put it there and live; None: it has to leave.

    The host is no one's container: work of another owner there must not be slowed under this one's rule.
    """
    if before.found.role is not Role.OFFLINE or container.key == HOST or not before.processes:
        return None
    again = _classified(policy, container, before.processes.values())
    return again if _same_rule(again, before.found) else None


def _kept(stays: Classification, odd: int) -> Classification:
    why = f"{odd} of its processes do not match" if odd else "a process of it matched before"
    return replace(stays, reason=f"{stays.reason}: kept, {why}")


@dataclass(frozen=True, slots=True)
class Roles:
    """The policy in force, and which containers are in its rules."""

    policy: Policy
    memberships: Memberships = field(default_factory=Memberships)


@dataclass(frozen=True, slots=True)
class Workload:
    """One container: its role by the policy, its processes on GPUs, and the devices that it can be on."""

    container: Container
    classification: Classification
    members: tuple[GpuProcess, ...]
    devices: frozenset[DeviceUuid]


def workloads_of(
    policy: Policy, members: Iterable[GpuProcess], snapshot: Snapshot, memberships: Memberships | None = None
) -> dict[ContainerKey, Workload]:
    """Classifies every container that has a process on a GPU; without `memberships` as if all came now."""
    known = Memberships() if memberships is None else memberships
    grouped: dict[ContainerKey, list[GpuProcess]] = {}
    for member in members:
        grouped.setdefault(member.container.key, []).append(member)
    used = _devices_in_use(snapshot)
    return {
        key: _workload(known.classify(policy, group[0].container, group), group, used.get(key, frozenset()))
        for key, group in grouped.items()
    }


def target_of(member: GpuProcess, slots: Mapping[DeviceUuid, int], devices: frozenset[DeviceUuid]) -> Target:
    """The kernel slots of a process's devices: by ordinal, and the only possible one where the ordinal is unknown."""
    by_ordinal = tuple(None if device is None else slots.get(device) for device in member.visible[:ORDINALS])
    possible = {slots[device] for device in (devices or member.devices) if device in slots}
    return Target(member.process.id, member.container.key, by_ordinal, possible.pop() if len(possible) == 1 else None)


def _workload(found: Classification, members: Sequence[GpuProcess], used: frozenset[DeviceUuid]) -> Workload:
    visible = frozenset(device for member in members for device in member.devices)
    return Workload(members[0].container, found, tuple(members), used or visible)


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
