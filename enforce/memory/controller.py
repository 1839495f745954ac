# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The memory part of a decision: look, plan, put limits in force, and say what rungs ought to be climbed, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agent.clock import wall_ns
from agent.layout import ProcessKey
from agent.libbpf import Map
from agent.model import ContainerKey, DeviceUuid, Snapshot
from enforce.ladder import Reasons
from enforce.memory.accounts import Tenant, View
from enforce.memory.bounds import Bounds, Refusals
from enforce.memory.planner import EVICT, SWAP, Act, State, plan
from enforce.memory.told import MemoryDecision, MemoryStance
from enforce.memory.view import Now, allowances_of, bounds_of, view_of
from enforce.model import Rung, Subject
from enforce.policy.model import Policy, Role
from enforce.roster import Seat, processes_of, subject_of
from enforce.rungs import Rungs


@dataclass(frozen=True, slots=True)
class Kept:
    """The outcome of one decision."""

    wishes: Mapping[ContainerKey, Reasons]
    stances: Mapping[ContainerKey, MemoryStance]
    told: tuple[MemoryDecision, ...]


@dataclass(slots=True)
class Keeper:
    """For one thread. `bounds` and `rungs` are None with enforce: false: then it plans and tells, and does nothing."""

    policy: Policy
    resumes: Map
    table: Mapping[str, Rung]
    bounds: Bounds | None
    rungs: Rungs | None
    clock: Callable[[], int] = wall_ns
    _state: State = field(default_factory=State)
    _refusals: dict[ContainerKey, Refusals] = field(default_factory=dict)
    _asked_at_ns: int | None = None  # of the snapshot at which `_unobstructed` was asked
    _unobstructed: dict[ContainerKey, frozenset[str]] = field(default_factory=dict)

    def step(
        self, snapshot: Snapshot, here: Mapping[ContainerKey, Seat], slots: Mapping[DeviceUuid, int], now_ns: int
    ) -> Kept:
        """One decision."""
        offline = {key: seat for key, seat in here.items() if seat.classification.role is Role.OFFLINE}
        refusals = {key: self.bounds.refusals(key) if self.bounds else Refusals() for key in offline}
        subjects = {key: subject for key, seat in offline.items() if (subject := subject_of(seat)) is not None}
        waiting = {key: since for key, seat in offline.items() if (since := self._waits(seat, refusals[key]))}
        if snapshot.at_ns != self._asked_at_ns:  # to ask reads many files
            self._asked_at_ns, self._unobstructed = snapshot.at_ns, {}
        possible = {key: self._possible(subject) for key, subject in subjects.items()}
        now = Now(possible, waiting, acting=self.rungs is not None)
        view = view_of(self.policy, snapshot, here, now)
        before = self._state.acts
        self._state, planned = plan(self._state, view, now_ns)
        if self.bounds:
            self.bounds.put(
                bounds_of(view, here, planned.limits, slots), allowances_of(view, here, planned.limits, slots), now_ns
            )
            self.bounds.keep(offline.keys())
        told = (*self._told_refusals(view, subjects, refusals), *self._told_acts(view, subjects, before, planned.acts))
        self._refusals = refusals
        return Kept(
            wishes={key: {act.rung: f"memory: {act.reason}"} for key, act in planned.acts.items() if key in subjects},
            stances={
                tenant.container: MemoryStance(
                    tenant.quota_bytes, refusals[tenant.container].denied, refusals[tenant.container].held
                )
                for tenant in view.tenants
            },
            told=told,
        )

    def release(self) -> None:
        """Bounds nobody any more, and forgets what was planned."""
        self._state = State()
        if self.bounds:
            self.bounds.release_all()

    def _possible(self, subject: Subject) -> tuple[str, ...]:
        """What is in force or under way is judged by what came of it: by then it may itself be in its own way."""
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

    def _waits(self, seat: Seat, refusals: Refusals) -> int | None:
        """Since when a process has been stopped with an allocation under way."""
        if not refusals.held or refusals.pending_bytes <= 0:
            return None
        records = (self.resumes.get(ProcessKey.of(process)) for process in processes_of(seat))
        return min((int(one.stopped_at_ns) for one in records if one is not None and one.stopped_at_ns), default=None)

    def _told_refusals(
        self, view: View, subjects: Mapping[ContainerKey, Subject], refusals: Mapping[ContainerKey, Refusals]
    ) -> list[MemoryDecision]:
        told = []
        for tenant in view.tenants:
            now, before = refusals[tenant.container], self._refusals.get(tenant.container, Refusals())
            room = now.for_room > before.for_room
            why = "an allocation leaves too little for online containers" if room else "an allocation is over its quota"
            for act, count in (("deny", now.denied - before.denied), ("hold", now.held - before.held)):
                if count > 0 and tenant.container in subjects:
                    told.append(self._line(tenant, subjects[tenant.container], act, count, None, why))
        return told

    def _told_acts(
        self,
        view: View,
        subjects: Mapping[ContainerKey, Subject],
        before: Mapping[ContainerKey, Act],
        after: Mapping[ContainerKey, Act],
    ) -> list[MemoryDecision]:
        told = []
        for tenant in view.tenants:
            old, new = before.get(tenant.container), after.get(tenant.container)
            subject = subjects.get(tenant.container)
            if subject is None:
                continue
            if new is not None and (old is None or old.rung != new.rung):
                told.append(self._line(tenant, subject, new.rung, 1, new.device, new.reason))
            elif old is not None and old.rung == SWAP and new is None:
                why = "there is room for it again" if SWAP in tenant.rungs else "it could not be swapped out"
                told.append(self._line(tenant, subject, "restore", 1, old.device, why))
        return told

    def _line(
        self, tenant: Tenant, subject: Subject, act: str, count: int, device: DeviceUuid | None, reason: str
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
            acted=self.bounds is not None,
        )
