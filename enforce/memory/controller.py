# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The memory part of a decision: view, plan, put limits in force, and say which rungs are wanted and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.core.clock import wall_ns
from agent.core.model import ContainerKey, DeviceUuid, Snapshot
from agent.probes.abi import ProcessKey
from agent.probes.libbpf import Map
from enforce.actuators.executor import RungExecutor
from enforce.actuators.ladder import Reasons
from enforce.memory.accounts import MemoryDecision, MemoryStatus, MemoryTenant, MemoryView
from enforce.memory.planner import EVICT, SWAP, MemoryPlanState, PlannedAct, plan
from enforce.memory.quotas import MemoryQuotas, Refusals
from enforce.memory.view import OfflineStatus, allocation_rules, group_quotas, view_of
from enforce.model import Rung, Subject
from enforce.policy.model import Policy, Role
from enforce.workloads import Workload, processes_of, subject_of


@dataclass(frozen=True, slots=True)
class MemoryOutcome:
    """The outcome of one decision. `decisions`: what is new since the last one, for the decision log."""

    wishes: Mapping[ContainerKey, Reasons]
    statuses: Mapping[ContainerKey, MemoryStatus]
    decisions: tuple[MemoryDecision, ...]


@dataclass(slots=True)
class MemoryController:
    """For one thread. `quotas` and `rungs` are None with enforce: false: then it plans, reports and does nothing."""

    policy: Policy
    resumes: Map
    table: Mapping[str, Rung]
    quotas: MemoryQuotas | None
    rungs: RungExecutor | None
    clock: Callable[[], int] = wall_ns
    _state: MemoryPlanState = field(default_factory=MemoryPlanState)
    _refusals: dict[ContainerKey, Refusals] = field(default_factory=dict)
    _asked_at_ns: int | None = None  # of the snapshot at which `_unobstructed` was asked
    _unobstructed: dict[ContainerKey, frozenset[str]] = field(default_factory=dict)

    def step(
        self,
        snapshot: Snapshot,
        workloads: Mapping[ContainerKey, Workload],
        slots: Mapping[DeviceUuid, int],
        now_ns: int,
    ) -> MemoryOutcome:
        """One decision."""
        offline = {key: one for key, one in workloads.items() if one.classification.role is Role.OFFLINE}
        refusals = {key: self.quotas.refusals(key) if self.quotas else Refusals() for key in offline}
        subjects = {key: subject for key, one in offline.items() if (subject := subject_of(one)) is not None}
        if not self._state.acts and not self._limits_anything(subjects):
            return self._without_limits(subjects, refusals, now_ns)
        view = view_of(self.policy, snapshot, workloads, self._offline_status(snapshot, offline, subjects, refusals))
        acts_before, refusals_before = self._state.acts, self._refusals
        self._state, planned = plan(self._state, view, now_ns)
        self._refusals = refusals
        if self.quotas:
            rules = allocation_rules(view, workloads, planned.limits, slots)
            self.quotas.put(rules, group_quotas(view, workloads, planned.limits, slots), now_ns)
            self.quotas.keep(offline.keys())
        decisions = (
            *self._new_refusals(view, subjects, refusals_before),
            *self._new_acts(view, subjects, acts_before),
        )
        wishes = {key: {act.rung: f"memory: {act.reason}"} for key, act in planned.acts.items() if key in subjects}
        return MemoryOutcome(wishes, {one.container: self._status(one) for one in view.tenants}, decisions)

    def _limits_anything(self, subjects: Mapping[ContainerKey, Subject]) -> bool:
        has_quota = any(one.rule.limits.memory_bytes is not None for one in subjects.values())
        return has_quota or any(rule.reserve_bytes is not None for rule in self.policy.online)

    def _without_limits(
        self, subjects: Mapping[ContainerKey, Subject], refusals: Mapping[ContainerKey, Refusals], now_ns: int
    ) -> MemoryOutcome:
        """The same as for a plan in which nothing is limited, without making one."""
        self._state, self._refusals = MemoryPlanState(), dict(refusals)
        if self.quotas:
            self.quotas.put({}, {}, now_ns)
            self.quotas.keep(refusals.keys())
        statuses = {key: MemoryStatus(None, refusals[key].denied, refusals[key].held) for key in subjects}
        return MemoryOutcome({}, statuses, ())

    def release(self) -> None:
        """Removes every limit, and forgets what was planned."""
        self._state = MemoryPlanState()
        if self.quotas:
            self.quotas.release_all()

    def _status(self, tenant: MemoryTenant) -> MemoryStatus:
        refusals = self._refusals[tenant.container]
        return MemoryStatus(tenant.quota_bytes, refusals.denied, refusals.held)

    def _offline_status(
        self,
        snapshot: Snapshot,
        offline: Mapping[ContainerKey, Workload],
        subjects: Mapping[ContainerKey, Subject],
        refusals: Mapping[ContainerKey, Refusals],
    ) -> OfflineStatus:
        if snapshot.at_ns != self._asked_at_ns:  # asking for obstacles reads many files
            self._asked_at_ns, self._unobstructed = snapshot.at_ns, {}
        possible = {key: self._possible(subject) for key, subject in subjects.items()}
        waiting = {key: since for key, one in offline.items() if (since := self._waits(one, refusals[key]))}
        return OfflineStatus(possible, waiting, acting=self.rungs is not None)

    def _possible(self, subject: Subject) -> tuple[str, ...]:
        """What is in force or begun is judged by its outcome: by then it may itself be an obstacle."""
        key = subject.container.key
        in_force = self.rungs.in_force(key) if self.rungs else frozenset[str]()
        troubles = self.rungs.troubles(key) if self.rungs else {}
        planned = self._state.acts.get(key)
        if key not in self._unobstructed:
            self._unobstructed[key] = self._ask(subject)
        begun = self._unobstructed[key] | ({planned.rung} if planned is not None else set())
        listed = (name for name in (SWAP, EVICT) if name in subject.rule.ladder and name in self.table)
        return tuple(name for name in listed if name in in_force or (name in begun and name not in troubles))

    def _ask(self, subject: Subject) -> frozenset[str]:
        able = (name for name in (SWAP, EVICT) if name in subject.rule.ladder and name in self.table)
        return frozenset(name for name in able if self.table[name].obstacle(subject) is None)

    def _waits(self, workload: Workload, refusals: Refusals) -> int | None:
        """Since when a process has been stopped at an allocation; None: it is not."""
        if not refusals.held or refusals.pending_bytes <= 0:
            return None
        records = (self.resumes.get(ProcessKey.of(process)) for process in processes_of(workload))
        return min((int(one.stopped_at_ns) for one in records if one is not None and one.stopped_at_ns), default=None)

    def _new_refusals(
        self,
        view: MemoryView,
        subjects: Mapping[ContainerKey, Subject],
        before: Mapping[ContainerKey, Refusals],
    ) -> list[MemoryDecision]:
        decisions = []
        for tenant in view.tenants:
            now, then = self._refusals[tenant.container], before.get(tenant.container, Refusals())
            room = now.for_room > then.for_room or tenant.quota_bytes is None
            why = "an allocation leaves too little for online containers" if room else "an allocation is over its quota"
            for act, count in (("deny", now.denied - then.denied), ("hold", now.held - then.held)):
                if count > 0 and tenant.container in subjects:
                    decisions.append(self._decision(tenant, subjects[tenant.container], act, count, None, why))
        return decisions

    def _new_acts(
        self,
        view: MemoryView,
        subjects: Mapping[ContainerKey, Subject],
        before: Mapping[ContainerKey, PlannedAct],
    ) -> list[MemoryDecision]:
        decisions = []
        for tenant in view.tenants:
            old, new = before.get(tenant.container), self._state.acts.get(tenant.container)
            subject = subjects.get(tenant.container)
            if subject is None:
                continue
            if new is not None and (old is None or old.rung != new.rung):
                decisions.append(self._decision(tenant, subject, new.rung, 1, new.device, new.reason))
            elif old is not None and old.rung == SWAP and new is None:
                why = "there is room for it again" if SWAP in tenant.rungs else "it could not be swapped out"
                decisions.append(self._decision(tenant, subject, "restore", 1, old.device, why))
        return decisions

    def _decision(  # six parameters: the columns of a line of the log that differ
        self, tenant: MemoryTenant, subject: Subject, act: str, count: int, device: DeviceUuid | None, reason: str
    ) -> MemoryDecision:
        shown = [tenant.on(device)] if device is not None else list(tenant.holdings.values())
        return MemoryDecision(
            wall_ns=self.clock(),
            container=str(tenant.container),
            device=str(device or ""),
            rule=subject.rule.name,
            act=act,
            count=count,
            held_bytes=sum(one.bytes for one in shown),
            source="probes" if any(one.nvml_bytes is None for one in shown) else "nvml",
            quota_bytes=tenant.quota_bytes,
            reason=reason,
            acted=self.quotas is not None,
        )
