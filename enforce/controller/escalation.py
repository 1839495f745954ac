# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which rungs beyond gate and pace each offline container is held by: what is wanted, and what of it is in force.

Latency asks by `enforce.actuators.ladder`; what memory, health and MPS faults ask for is handed in. Only containers of
an offline rule can be acted upon, and only by rungs that their rule lists. Without an executor (`enforce: false`)
nothing is done; it is only reported.

The exception from the ladder is a container whose GPU work has no launches that the probes see (`UnprobedRungs`):
neither gate nor pace can hold it, so its rule says by `unprobed` whether it is frozen (by turns, within the rule's
longest pause and floor) or evicted; neither has to be in the rule's ladder, which is climbed for other reasons. Both
only while an online container on a device where it works unseen is in need: it has requests, or its SLO is missed. The
need is held for some seconds, as requests come one by one. Where the rule does not ignore it, the log has it once.

Invariant: nothing is asked for a container that is not offline, nor, by `unprobed`, for one beside which no online one
is in need.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, Snapshot
from agent.core.text import printable
from enforce.actuators.executor import RungExecutor
from enforce.actuators.freezer.rung import Freeze
from enforce.actuators.ladder import (
    EVICT_AFTER_NS,
    FROM_THE_START,
    EscalationStatus,
    LadderState,
    Reasons,
    UndoneStops,
    advance,
    merged,
    strongest,
)
from enforce.controller.decision import DecisionInputs, Decisions, ShareDecision
from enforce.device_health import HealthView
from enforce.model import Rung, Subject, slack_ratio
from enforce.policy.model import OnlineRule, Role
from enforce.workloads import Workload, subject_of

_log = logging.getLogger(__name__)
LATENCY = "the promise is missed with the least share"
ONLINE = "an online container is on its GPUs"
UNDONE = "other processes end its stops"
UNSEEN: Final = "it works on a GPU without launches that the probes see"
NOTHING: Reasons = {}
NEED_HOLD_NS: Final = 5 * NS_PER_SECOND
_AT_ALLOCATIONS = ("deny", "hold")


class Escalation:
    """The ladder state of every offline container. For the deciding thread alone.

    `no_allocations`: why no allocation is seen, so that none can be denied or held; None: they are seen.
    """

    def __init__(
        self, table: Mapping[str, Rung], executor: RungExecutor | None, no_allocations: str | None = None
    ) -> None:
        self._table, self._executor, self._no_allocations = table, executor, no_allocations
        self._blind: dict[ContainerKey, dict[str, str]] = {}  # rungs that have a memory limit, and cannot work
        self._undone = UndoneStops()
        self._states: dict[ContainerKey, LadderState] = {}
        self._wanted: dict[ContainerKey, Reasons] = {}
        self._obstacles: dict[ContainerKey, dict[str, str]] = {}  # step → why it was passed over, the last time

    def losses(self) -> dict[str, int]:
        """What failed, or was changed by another writer: for Snapshot.lost."""
        freeze = self._table.get("freeze")
        foreign = {"freeze:foreign": freeze.foreign_writes} if isinstance(freeze, Freeze) else {}
        return {"rungs:failed": self._executor.failures if self._executor else 0, **foreign}

    def look(self, foreign: Mapping[ContainerKey, int], now_ns: int) -> None:
        """Before `step`: how many stops of each container other processes ended so far."""
        for key in self._undone.see(foreign, now_ns):
            _log.warning("%s: other processes end its stops: it is frozen instead if its rule lists freeze", key)

    def step(
        self,
        workloads: Mapping[ContainerKey, Workload],
        decisions: Decisions,
        now_ns: int,
        others: Sequence[Mapping[ContainerKey, Reasons]] = (),
        unprobed: Mapping[ContainerKey, Reasons] | None = None,
    ) -> None:
        """Once per decision. `others`: what memory, health and faults ask for; of two equal ones the earlier counts.

        `unprobed`: what `UnprobedRungs` asks for, which the rule allows apart from its ladder.
        """
        subjects = {key: subject for key, one in workloads.items() if (subject := subject_of(one)) is not None}
        shares = {share.workload.container.key: share for share in decisions.shares}
        self._states = {
            key: self._advance(subjects[key], share, now_ns) for key, share in shares.items() if key in subjects
        }
        self._obstacles = {key: whys for key, whys in self._obstacles.items() if key in self._states}
        self._blind = {key: self._blind_rungs(subject) for key, subject in subjects.items()}
        self._wanted = {}
        for key, subject in subjects.items():
            latency = self._by_latency(key, shares.get(key))
            undone = self._instead_of_stops(subject, now_ns) if key in shares else NOTHING
            wishes = [*(wish.get(key, NOTHING) for wish in others), latency, undone]
            ladder = [rung for rung in subject.rule.ladder if rung in self._table]
            beside = (unprobed or {}).get(key, NOTHING)
            allowed = [rung for rung in beside if rung in self._table]
            if wanted := merged([*ladder, *allowed], [merged(ladder, wishes), beside]):
                self._wanted[key] = wanted
        if self._executor is not None:
            self._allow_freezing(others)
            self._executor.want({key: (subjects[key], frozenset(wanted)) for key, wanted in self._wanted.items()})

    def status(self, key: ContainerKey) -> EscalationStatus:
        """As of the last `step`; without an executor, what would be done."""
        wanted = self._wanted.get(key, NOTHING)
        obstacles = {**self._blind.get(key, {}), **self._obstacles.get(key, {})}
        if self._executor is None:
            return EscalationStatus(tuple(wanted), obstacles, wanted)
        return EscalationStatus(
            tuple(sorted(self._executor.in_force(key))), {**obstacles, **self._executor.troubles(key)}, wanted
        )

    def reasons(self, key: ContainerKey) -> tuple[str, ...]:
        """Why each rung is wanted, for the decision log."""
        wanted = self._wanted.get(key, NOTHING)
        return tuple(f"{rung}: {why}" for rung, why in wanted.items() if rung not in FROM_THE_START)

    def begin_release(self) -> None:
        """Has everything undone without waiting for it, and forgets all ladder states."""
        self._states, self._wanted, self._obstacles = {}, {}, {}
        if self._executor is not None:
            self._allow_freezing([])
            self._executor.want({})

    def release(self) -> None:
        """As `begin_release`, and waits until everything that can be undone is: for the end."""
        self.begin_release()
        if self._executor is not None:
            self._executor.release_all()

    def _advance(self, subject: Subject, decision: ShareDecision, now_ns: int) -> LadderState:
        key = subject.container.key
        troubles = self._executor.troubles(key) if self._executor else {}
        if not decision.share.exhausted:
            self._obstacles.pop(key, None)  # no climb is wanted
        obstacles = self._obstacles.setdefault(key, {})

        def able(step: str) -> bool:
            obstacle = self._table[step].obstacle(subject) if step in self._table else "it is not in this version"
            obstacles.pop(step, None)
            if obstacle is not None:
                obstacles[step] = obstacle
            return obstacle is None and step not in troubles

        state = self._states.get(key) or LadderState(since_ns=now_ns)
        return advance(state, subject.rule.ladder, decision.share.exhausted, able, now_ns)

    def _blind_rungs(self, subject: Subject) -> dict[str, str]:
        if self._no_allocations is None or subject.rule.limits.memory_bytes is None:
            return {}
        return {rung: self._no_allocations for rung in subject.rule.ladder if rung in _AT_ALLOCATIONS}

    def _by_latency(self, key: ContainerKey, decision: ShareDecision | None) -> Reasons:
        if decision is None:
            return NOTHING
        wishes = {name: ONLINE for name in FROM_THE_START if self._is_able(name, decision)}
        step = self._states[key].step if key in self._states else None
        return wishes if step is None else {**wishes, step: LATENCY}

    def _instead_of_stops(self, subject: Subject, now_ns: int) -> Reasons:
        """What no SIGCONT and no tracer ends."""
        freeze, key = self._table.get("freeze"), subject.container.key
        if freeze is None or "freeze" not in subject.rule.ladder or not self._undone.are(key, now_ns):
            return NOTHING
        obstacle = freeze.obstacle(subject)
        if obstacle is not None:
            self._obstacles.setdefault(key, {})["freeze"] = obstacle
        return NOTHING if obstacle else {"freeze": UNDONE}

    def _is_able(self, name: str, decision: ShareDecision) -> bool:
        """Whether it is possible now: what became impossible is undone, what became possible again is done."""
        rung, subject = self._table.get(name), subject_of(decision.workload)
        return rung is not None and subject is not None and rung.obstacle(subject) is None

    def _allow_freezing(self, others: Sequence[Mapping[ContainerKey, Reasons]]) -> None:
        """A container that only latency wants frozen is thawed by turns, so that it keeps its floor."""
        freeze = self._table.get("freeze")
        if isinstance(freeze, Freeze):
            steady = {key for wishes in others for key, wish in wishes.items() if "freeze" in wish}
            freeze.allow({key: key in steady for key, wanted in self._wanted.items() if "freeze" in wanted})


def evictions_for_health(
    workloads: Mapping[ContainerKey, Workload], health: Mapping[DeviceUuid, HealthView]
) -> dict[ContainerKey, Reasons]:
    """Offline containers that have to leave an unfit device: by the strongest step that the rule lists."""
    wishes: dict[ContainerKey, Reasons] = {}
    for key, workload in workloads.items():
        subject = subject_of(workload)
        unfit = [health[device] for device in workload.devices if device in health and health[device].must_leave]
        step = strongest(subject.rule.ladder) if subject is not None else None
        if unfit and step is not None:
            wishes[key] = {step: f"device {unfit[0].state}: {unfit[0].reason}"}
    return wishes


@dataclass(slots=True)
class _Need:
    """Since when, and until when at least, an online container needs the device that one works on unseen."""

    since_ns: int
    until_ns: int


@dataclass(slots=True)
class UnprobedRungs:
    """Freeze or eviction of offline containers whose work the probes do not see. For the deciding thread."""

    _needs: dict[ContainerKey, _Need] = field(default_factory=dict)
    _logged: set[ContainerKey] = field(default_factory=set)

    def step(self, snapshot: Snapshot, inputs: DecisionInputs, now_ns: int) -> dict[ContainerKey, Reasons]:
        """Once per decision: rung and reason for each container that has to be frozen or evicted."""
        unseen = _unseen(snapshot)
        subjects = {key: subject_of(inputs.workloads[key]) for key in unseen.keys() & inputs.workloads.keys()}
        rules = {key: subject.rule for key, subject in subjects.items() if subject is not None}
        self._needs = {key: need for key, need in self._needs.items() if key in rules}
        wanted: dict[ContainerKey, Reasons] = {}
        for key, rule in rules.items():
            need = self._need(key, unseen[key], inputs, now_ns)
            if need is None or rule.unprobed not in ("freeze", "evict"):
                continue
            if rule.unprobed == "freeze" or now_ns - need.since_ns >= EVICT_AFTER_NS:
                wanted[key] = {rule.unprobed: UNSEEN}
        self._log({key for key, rule in rules.items() if rule.unprobed != "ignore"}, inputs.workloads)
        return wanted

    def _need(
        self, key: ContainerKey, devices: frozenset[DeviceUuid], inputs: DecisionInputs, now_ns: int
    ) -> _Need | None:
        need = self._needs.get(key)
        if any(_is_in_need(other, devices, inputs) for other in inputs.workloads.values()):
            since_ns = need.since_ns if need is not None else now_ns
            need = self._needs[key] = _Need(since_ns, now_ns + NEED_HOLD_NS)
        elif need is not None and now_ns >= need.until_ns:
            del self._needs[key]
            need = None
        return need

    def _log(self, unseen: set[ContainerKey], workloads: Mapping[ContainerKey, Workload]) -> None:
        for key in unseen - self._logged:
            name = printable(workloads[key].container.name, 160)
            _log.warning("%s: unprobed: %s; gate and pace cannot hold it", name, UNSEEN)
        self._logged = unseen


def _unseen(snapshot: Snapshot) -> dict[ContainerKey, frozenset[DeviceUuid]]:
    found = {
        row.container.key: frozenset(device for device, unprobed in row.unprobed.items() if unprobed)
        for row in snapshot.containers
    }
    return {key: devices for key, devices in found.items() if devices}


def _is_in_need(other: Workload, devices: frozenset[DeviceUuid], inputs: DecisionInputs) -> bool:
    """Whether it is online on one of the devices, and has requests or misses its SLO."""
    rule, here = other.classification.rule, other.devices & devices
    if other.classification.role is not Role.ONLINE or not isinstance(rule, OnlineRule) or not here:
        return False
    reading = inputs.readings.get(other.container.key)
    slack = slack_ratio(reading, rule.slo)
    has_requests = reading is not None and reading.recent_samples > 0
    return has_requests or (slack is not None and slack < 0) or any(inputs.busy.get(device) for device in here)
