# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One decision for all containers: inputs → shares → launch levels. Pure but for the laws' states, which it returns.

Rules: the online container with the least slack rules its devices; an offline container is held only where an online
or a periodic one is: beside periodic ones alone it has all the time that their requests leave. What offline work may
use of a device is split between the offline containers there by weighted max-min fairness (progressive filling;
Bertsekas and Gallager, Data Networks, §6.5.2): a container that wants less than its part has what it wants, and the
others share the rest by weight. Within a container it is split between its processes in the same way. On several
devices the strictest share holds. Where copies are paced they are so on every device, also without an online container:
there the offline ones share the link by weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from agent.core.model import ContainerKey, DeviceUuid, ProcessId
from enforce.actuators.launch.levels import copy_level, offline_level
from enforce.controller.laws import law_of
from enforce.device_health import HealthView, limit, worst
from enforce.model import FULL, CopyLevel, Level, OnlineOn, Reading, Share, Target, slack_ratio
from enforce.policy.model import OfflineRule, OnlineRule, PeriodicRule, Role, Tuning
from enforce.workloads import Workload, processes_of, target_of

K = TypeVar("K")
_EPSILON = 1e-12
_QUEUED_RATIO = 0.05  # of the shortest deadline: what offline work may have queued when a request begins


@dataclass(frozen=True, slots=True)
class ShareClaim:
    """`weight` > 0; `wanted` is a fraction 0–1 of what there is to split; 1 where it is unknown."""

    weight: float
    wanted: float = 1.0


def parts(claims: Mapping[K, ShareClaim]) -> dict[K, float]:
    """What each claim gets: fractions 0–1 with a sum of at most 1, and of 1 where the claims together want it."""
    given = dict.fromkeys(claims, 0.0)
    open_claims = {key: claim for key, claim in claims.items() if claim.wanted > 0}
    left = 1.0
    while open_claims and left > _EPSILON:
        weights = sum(claim.weight for claim in open_claims.values())
        fill = {key: claim.weight / weights * left for key, claim in open_claims.items()}
        content = {key: claim for key, claim in open_claims.items() if claim.wanted <= fill[key] + _EPSILON}
        if not content:
            return given | fill
        for key, claim in content.items():
            given[key] = claim.wanted
            left -= claim.wanted
            del open_claims[key]
    return given


_SPARED: Final = (Role.PROTECTED, Role.UNMATCHED)


@dataclass(frozen=True, slots=True)
class DecisionInputs:
    """What a decision is made from. What is missing in a mapping is unknown."""

    workloads: Mapping[ContainerKey, Workload]
    readings: Mapping[ContainerKey, Reading | None]
    slots: Mapping[DeviceUuid, int]
    launch_ns: Mapping[ProcessId, float] = field(default_factory=dict)  # estimated GPU time of one launch
    wanted: Mapping[ProcessId, float] = field(default_factory=dict)  # share of a device that it would use unhindered
    busy: Mapping[DeviceUuid, float] = field(default_factory=dict)  # share of time that online requests run
    blocks: Mapping[DeviceUuid, int] = field(default_factory=dict)  # that online processes launched, ever
    health: Mapping[DeviceUuid, HealthView] = field(default_factory=dict)
    shares: Mapping[ContainerKey, float] = field(default_factory=dict)  # of offline containers, as decided last
    launching: Mapping[ProcessId, frozenset[DeviceUuid]] = field(default_factory=dict)  # where a process is at work
    copy_groups: Mapping[ContainerKey, int] = field(default_factory=dict)  # of containers whose copies are paced

    @property
    def spared(self) -> frozenset[ProcessId]:
        """The GPU processes that no launch rule is for."""
        of_none = (one for one in self.workloads.values() if one.classification.role in _SPARED)
        return frozenset(process for workload in of_none for process in processes_of(workload))


@dataclass(frozen=True, slots=True)
class ShareDecision:
    """What was decided for one offline container. `ruler` is the online container that it is held for."""

    workload: Workload
    rule: OfflineRule
    ruler: OnlineOn
    share: Share
    state: Any  # the law's, for the next decision

    def by_quantile(self) -> tuple[OnlineOn, ...]:
        """The ruler by the quantile that bound the decision, and then by its other one, if it has two."""
        return tuple(sorted(self.ruler.by_quantile(), key=lambda one: one.slo.quantile != self.share.quantile))


@dataclass(frozen=True, slots=True)
class Decisions:
    """The outcome of one decision: one share per offline container that is held, and a level per process."""

    shares: tuple[ShareDecision, ...]
    levels: Mapping[Target, Level]
    copies: Mapping[ContainerKey, str] = field(default_factory=dict)  # how those of a container are paced, in words


NO_DECISIONS: Final = Decisions((), {})


def decide(inputs: DecisionInputs, states: Mapping[ContainerKey, Any], tuning: Tuning, now_ns: int) -> Decisions:
    """See the module. `states`: of the laws, by offline container, as the last decision returned them."""
    online = [one for one in inputs.workloads.values() if one.classification.role is Role.ONLINE]
    offline = [one for one in inputs.workloads.values() if one.classification.role is Role.OFFLINE]
    shares, rulers = [], _rulers(online, inputs)
    for workload in offline:
        rule, ruler = workload.classification.rule, _ruler(workload, rulers)
        if ruler is None or not isinstance(rule, OfflineRule):
            continue
        law, state = law_of(rule, tuning), states.get(workload.container.key)
        state, share = law.step(law.start() if state is None else state, ruler, now_ns)
        shares.append(ShareDecision(workload, rule, ruler, _limited(share, workload, rule, inputs), state))
    levels = {
        target_of(member, inputs.slots, workload.devices): Level(online=True)
        for workload in online
        for member in workload.members
    }
    split = _split(shares, inputs)
    for share_decision in shares:
        levels |= _levels(share_decision, split, inputs)
    levels |= _beside_periodic(offline, levels, inputs)
    levels |= _periodic_levels(inputs)
    if inputs.copy_groups:
        levels |= _with_copies(levels, online, offline, inputs)
    return Decisions(tuple(shares), levels)


def _with_copies(
    levels: Mapping[Target, Level], online: Iterable[Workload], offline: Iterable[Workload], inputs: DecisionInputs
) -> dict[Target, Level]:
    """The levels of all processes whose copies are paced, and of those that these wait for."""
    found = {target: replace(level, copies=CopyLevel()) for target, level in levels.items() if level.online}
    online_devices = frozenset(device for workload in online for device in workload.devices)
    for workload in offline:
        group, rule = inputs.copy_groups.get(workload.container.key), workload.classification.rule
        if group is None or not isinstance(rule, OfflineRule):
            continue
        copies = copy_level(rule, group, beside_online=bool(workload.devices & online_devices))
        for member in workload.members:
            target = target_of(member, inputs.slots, workload.devices)
            level = levels.get(target, FULL)
            found[target] = replace(level, copies=copies, max_pause_ns=rule.limits.max_pause_ns)
    return found


def _rulers(online: Iterable[Workload], inputs: DecisionInputs) -> dict[DeviceUuid, list[tuple[float, OnlineOn]]]:
    """The online containers on each device, with the slack of each."""
    found: dict[DeviceUuid, list[tuple[float, OnlineOn]]] = {}
    for other in online:
        rule, key = other.classification.rule, other.container.key
        if not isinstance(rule, OnlineRule):
            continue
        reading = inputs.readings.get(key)
        slack = slack_ratio(reading, rule.slo)
        for device in sorted(other.devices):
            busy, blocks = inputs.busy.get(device), inputs.blocks.get(device)
            one = OnlineOn(key, device, rule.slo, reading, busy_ratio=busy, blocks_total=blocks)
            found.setdefault(device, []).append((1.0 if slack is None else slack, one))
    return found


def _ruler(workload: Workload, rulers: Mapping[DeviceUuid, Sequence[tuple[float, OnlineOn]]]) -> OnlineOn | None:
    """The online container with the least slack on the workload's devices; of two alike the busier one."""
    candidates = [one for device in sorted(workload.devices) for one in rulers.get(device, ())]
    found = min(candidates, key=lambda one: (one[0], -(one[1].busy_ratio or 0.0)), default=None)
    return None if found is None else found[1]


def _limited(share: Share, workload: Workload, rule: OfflineRule, inputs: DecisionInputs) -> Share:
    """The share under the health of the worst of the workload's devices."""
    health = worst([inputs.health[device] for device in sorted(workload.devices) if device in inputs.health])
    return limit(share, health, inputs.shares.get(workload.container.key), rule.limits.floor_ratio)


def _split(shares: Iterable[ShareDecision], inputs: DecisionInputs) -> dict[DeviceUuid, dict[ContainerKey, float]]:
    """Device → container → its part of what offline work may use there."""
    claims: dict[DeviceUuid, dict[ContainerKey, ShareClaim]] = {}
    for one in shares:
        for device in one.workload.devices:
            wanted = sum(_wanted_on(device, one.workload, inputs).values())
            ratio = min(1.0, wanted / one.share.ratio) if one.share.ratio > 0 else 1.0
            claims.setdefault(device, {})[one.workload.container.key] = ShareClaim(one.rule.weight, ratio)
    return {device: parts(of_device) for device, of_device in claims.items()}


def _levels(
    decision: ShareDecision, split: Mapping[DeviceUuid, Mapping[ContainerKey, float]], inputs: DecisionInputs
) -> dict[Target, Level]:
    """The levels of the container's processes: on each device its part is split between those that work there."""
    fractions: dict[ProcessId, tuple[float, float]] = {}  # of the share, and of the container's part of it
    for device in sorted(decision.workload.devices):
        part = split[device][decision.workload.container.key]
        for process, inside in _inside(
            _wanted_on(device, decision.workload, inputs), decision.share.ratio * part
        ).items():
            fractions[process] = min(fractions.get(process, (1.0, 1.0)), (part * inside, inside))
    return {
        target_of(member, inputs.slots, decision.workload.devices): offline_level(
            decision.rule,
            decision.share,
            *fractions.get(member.process.id, (1.0, 1.0)),
            inputs.launch_ns.get(member.process.id),
        )
        for member in decision.workload.members
    }


def _periodic_levels(inputs: DecisionInputs) -> dict[Target, Level]:
    """The levels of periodic processes."""
    levels: dict[Target, Level] = {}
    for workload in inputs.workloads.values():
        rule = workload.classification.rule
        if isinstance(rule, PeriodicRule):
            level = Level(deadline_ns=rule.deadline_ns, max_pause_ns=rule.max_pause_ns)
            levels |= {target_of(one, inputs.slots, workload.devices): level for one in workload.members}
    return levels


def _beside_periodic(
    offline: Iterable[Workload], held: Mapping[Target, Level], inputs: DecisionInputs
) -> dict[Target, Level]:
    """The levels of offline processes on the devices of periodic ones, also of those that are held anyway."""
    levels, shortest_ns = dict[Target, Level](), shortest_deadlines_ns(inputs)
    for workload in offline:
        rule, beside = workload.classification.rule, workload.devices & shortest_ns.keys()
        if not beside or not isinstance(rule, OfflineRule):
            continue
        queued_ns = rule.limits.max_queued_ns or int(min(shortest_ns[one] for one in beside) * _QUEUED_RATIO)
        for member in workload.members:
            target = target_of(member, inputs.slots, workload.devices)
            free = offline_level(rule, Share(1.0, queued_ns, ""), 1.0, 1.0, inputs.launch_ns.get(member.process.id))
            before = held.get(target, free)
            if not before.by_blocks:  # blocks have no length that a queue could be bounded by
                levels[target] = replace(before, soft=False, max_queued_ns=min(before.max_queued_ns, queued_ns))
    return levels


def shortest_deadlines_ns(inputs: DecisionInputs) -> dict[DeviceUuid, int]:
    """Of the periodic containers on each device that has any."""
    found: dict[DeviceUuid, int] = {}
    for workload in inputs.workloads.values():
        rule = workload.classification.rule
        if isinstance(rule, PeriodicRule):
            for device in workload.devices:
                found[device] = min(rule.deadline_ns, found.get(device, rule.deadline_ns))
    return found


def _wanted_on(device: DeviceUuid, workload: Workload, inputs: DecisionInputs) -> dict[ProcessId, float]:
    """What each process that works on the device wants of it, 0–1; 1 if unknown, or while it is being stopped."""
    wanted = {}
    for member in workload.members:
        process = member.process.id
        at_work = inputs.launching.get(process) or (member.devices & workload.devices) or workload.devices
        if device in at_work:
            ratio = inputs.wanted.get(process, 1.0)
            wanted[process] = ratio / len(at_work) if ratio < 1 else 1.0
    return wanted


def _inside(wanted: Mapping[ProcessId, float], whole: float) -> dict[ProcessId, float]:
    """Fractions of the container's part, with a sum of 1."""
    given = parts({process: ShareClaim(1.0, min(1.0, ratio / max(whole, 1e-9))) for process, ratio in wanted.items()})
    total = sum(given.values())
    return {process: part / total if total else 1.0 / len(given) for process, part in given.items()}
