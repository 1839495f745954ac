# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Writes each decision to the decision log and to the history of the last hour, and one SLO window later its effect.

Invariant: decisions that wait for their effect are bounded, and those that found no room are counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.core.clock import NS_PER_SECOND, wall_ns
from agent.core.model import ContainerKey
from enforce.audit.decision_log import DecisionLog, DecisionRecord, OfQuantile, as_line
from enforce.audit.history import DecisionHistory
from enforce.audit.model import ContainerInfo, DecisionEffect
from enforce.audit.status import Paused
from enforce.controller.decision import Decisions, ShareDecision
from enforce.memory.accounts import MemoryDecision
from enforce.model import OnlineOn, Reading, slack_ratio
from enforce.policy.model import OfflineRule, OnlineRule, Slo
from enforce.workloads import Workload

MOST_WAITING = 8192  # 80 containers with ten new decisions a second each, and a window of ten seconds


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """The line that follows a decision's line: its fields are the log's. None: unknown.

    `decision_wall_ns` and `container` say which decision it is about.
    """

    wall_ns: int
    container: str
    device: str
    ruler: str
    decision_wall_ns: int
    window_ns: int
    latency_ns: float | None
    samples: int
    target_ns: int
    slack_ratio: float | None
    share: float | None  # in force now
    max_queued_ns: int | None
    paused_ratio: float | None  # of the window; the mean over its processes


@dataclass(frozen=True, slots=True, order=True)
class Awaited:
    """A decision, and when to look at its effect."""

    due_ns: int
    number: int
    decided_ns: int = field(compare=False)
    slo: Slo = field(compare=False)
    decision: DecisionRecord = field(compare=False)


class Effects:
    """Decisions that wait for their SLO window to pass. Bounded: `skipped` counts those that found no room."""

    def __init__(self) -> None:
        self._waiting: list[Awaited] = []
        self._number = 0
        self.skipped = 0

    def expect(self, decision: DecisionRecord, slo: Slo, now_ns: int) -> None:
        """Has the decision be due in one window of the SLO."""
        if len(self._waiting) >= MOST_WAITING:
            self.skipped += 1
            return
        self._number += 1
        heapq.heappush(self._waiting, Awaited(now_ns + slo.window_ns, self._number, now_ns, slo, decision))

    def due(self, now_ns: int) -> list[Awaited]:
        """Decisions whose window has passed; each is returned once."""
        found = []
        while self._waiting and self._waiting[0].due_ns <= now_ns:
            found.append(heapq.heappop(self._waiting))
        return found


_UPDATE_NS = NS_PER_SECOND
_IN_KERNEL = ("gate", "pace")  # rungs that a level puts in force, and not enforce.actuators.executor
_NEVER_PAUSED = Paused(0, 0.0, None)
Readings = Mapping[ContainerKey, Reading | None]


@dataclass(slots=True)
class DecisionRecorder:
    """For the deciding thread alone, once per decision. The callables say of a container what the ladder does to it."""

    log: DecisionLog
    history: DecisionHistory
    acts: bool
    in_force: Callable[[ContainerKey], frozenset[str]] = lambda key: frozenset()  # rungs beyond pace and gate
    troubles: Callable[[ContainerKey], Mapping[str, str]] = lambda key: {}
    reasons: Callable[[ContainerKey], Sequence[str]] = lambda key: ()  # beside the law's: of memory, of health
    about: Callable[[ContainerKey], str | None] = lambda key: None  # of one that is periodic: in place of the reason
    effects: Effects = field(default_factory=Effects)
    _updated_ns: int | None = None
    _last: dict[ContainerKey, DecisionRecord] = field(default_factory=dict)

    def record(
        self,
        workloads: Mapping[ContainerKey, Workload],
        decisions: Decisions,
        readings: Readings,
        paused: Mapping[ContainerKey, Paused],
        now_ns: int,
    ) -> None:
        """What was decided now, and the effects of earlier decisions."""
        self._record_containers(workloads, readings, now_ns)
        last, self._last = self._last, {}
        for one in decisions.shares:
            key = one.workload.container.key
            ruler = workloads.get(one.ruler.container)
            reasons = self._reasons(key, decisions)
            decision = self._decision(one, ruler, last.get(key), paused.get(key, _NEVER_PAUSED), reasons)
            self._last[key] = decision
            self.history.record_decision(decision, now_ns)
            if self.log.write(decision):
                self.effects.expect(decision, one.by_quantile()[0].slo, now_ns)
        for key, workload in workloads.items():
            if key in self._last:
                continue
            unruled = self._unruled(workload, paused.get(key, _NEVER_PAUSED), self._reasons(key, decisions))
            if unruled is not None:
                self.history.record_decision(unruled, now_ns)
                self.log.write(unruled)
        for awaited in self.effects.due(now_ns):
            self._record_effect(awaited, readings.get(ContainerKey(awaited.decision.ruler)))

    def record_memory(self, decision: MemoryDecision) -> None:
        """What was done because of memory."""
        if self.log.write(decision):
            self.history.for_memory.append(decision)

    def losses(self) -> dict[str, int]:
        """What could not be written or remembered: for Snapshot.lost."""
        return {
            "decisions:dropped": self.log.dropped,
            "decisions:unwritten": self.log.errors,
            "effects:skipped": self.effects.skipped,
            "history:crowded_out": self.history.crowded_out,
        }

    def _record_containers(self, workloads: Mapping[ContainerKey, Workload], readings: Readings, now_ns: int) -> None:
        if self._updated_ns is None or now_ns - self._updated_ns >= _UPDATE_NS:
            self._updated_ns = now_ns
            self.history.update_containers([_info(one, self.about(key)) for key, one in workloads.items()], now_ns)
        for key, workload in workloads.items():
            if isinstance(rule := workload.classification.rule, OnlineRule):
                self.history.record_reading(key, rule, readings.get(key), now_ns)

    def _decision(
        self,
        decision: ShareDecision,
        online: Workload | None,
        before: DecisionRecord | None,
        paused: Paused,
        reasons: Sequence[str],
    ) -> DecisionRecord:
        container, share = decision.workload.container, decision.share
        ruler, *others = decision.by_quantile()
        reading = ruler.reading
        return DecisionRecord(
            wall_ns=wall_ns(),
            container=str(container.key),
            device=str(ruler.device),
            rule=decision.rule.name,
            law=decision.rule.law,
            latency_ns=None if reading is None else reading.latency_ns,
            samples=0 if reading is None else reading.samples,
            quantile=ruler.slo.quantile,
            target_ns=ruler.slo.target_ns,
            slack_ratio=slack_ratio(reading, ruler.slo),
            share_before=None if before is None else before.share_after,
            share_after=share.ratio,
            max_queued_ns=share.max_queued_ns,
            reason="; ".join((share.reason, *reasons)),
            acted=self.acts,
            max_queued_before_ns=None if before is None else before.max_queued_ns,
            name=container.name,
            pod=container.pod,
            namespace=container.namespace,
            ruler=str(ruler.container),
            ruler_name=str(ruler.container) if online is None else online.container.name,
            rungs=self._rungs(container.key, decision.rule, _IN_KERNEL if self.acts else ()),
            troubles=dict(self.troubles(container.key)),
            pauses=paused.pauses,
            paused_seconds=paused.seconds,
            other=_other(others[0]) if others else None,
        )

    def _reasons(self, key: ContainerKey, decisions: Decisions) -> tuple[str, ...]:
        copies = decisions.copies.get(key)
        return (*self.reasons(key), *((copies,) if copies else ()))

    def _unruled(self, workload: Workload, paused: Paused, reasons: Sequence[str]) -> DecisionRecord | None:
        """What is done to an offline container for another cause than latency; None: nothing is."""
        container, rule = workload.container, workload.classification.rule
        if not isinstance(rule, OfflineRule):
            return None
        rungs = self._rungs(container.key, rule, ())
        if not reasons and not rungs:
            return None
        return DecisionRecord(
            wall_ns=wall_ns(),
            container=str(container.key),
            device=min(workload.devices, default=""),
            rule=rule.name,
            law=rule.law,
            latency_ns=None,
            samples=0,
            quantile=0.0,
            target_ns=0,
            slack_ratio=None,
            share_before=None,
            share_after=1.0,
            max_queued_ns=0,
            reason="; ".join(reasons) or f"{', '.join(rungs)} in force, with no online container on its GPUs",
            acted=self.acts,
            name=container.name,
            pod=container.pod,
            namespace=container.namespace,
            rungs=rungs,
            troubles=dict(self.troubles(container.key)),
            pauses=paused.pauses,
            paused_seconds=paused.seconds,
        )

    def _rungs(self, key: ContainerKey, rule: OfflineRule, kernel: tuple[str, ...]) -> tuple[str, ...]:
        """Rungs in force in the ladder's order; those that the ladder does not name come last."""
        in_force = self.in_force(key)
        named = tuple(rung for rung in rule.ladder if rung in in_force or rung in kernel)
        return (*named, *sorted(in_force - set(rule.ladder)))

    def _record_effect(self, awaited: Awaited, reading: Reading | None) -> None:
        decision = awaited.decision
        reading = reading.of(decision.quantile) if reading is not None else None
        latest = self._last.get(ContainerKey(decision.container))
        latency = None if reading is None else reading.latency_ns
        slack, window_ns = slack_ratio(reading, awaited.slo), awaited.slo.window_ns
        paused = None if latest is None else latest.paused_seconds - decision.paused_seconds
        effect = EffectRecord(
            wall_ns=wall_ns(),
            container=decision.container,
            device=decision.device,
            ruler=decision.ruler,
            decision_wall_ns=decision.wall_ns,
            window_ns=window_ns,
            latency_ns=latency,
            samples=0 if reading is None else reading.samples,
            target_ns=decision.target_ns,
            slack_ratio=slack,
            share=None if latest is None else latest.share_after,
            max_queued_ns=None if latest is None else latest.max_queued_ns,
            paused_ratio=None if paused is None else min(1.0, max(0.0, paused / (window_ns / NS_PER_SECOND))),
        )
        self.log.write_effect(effect_line(effect))
        before = (decision.latency_ns, latency, decision.slack_ratio, slack)
        self.history.record_effect(decision.container, DecisionEffect(awaited.decided_ns, window_ns, *before))


def _other(online: OnlineOn) -> OfQuantile:
    latency_ns = None if online.reading is None else online.reading.latency_ns
    slack = slack_ratio(online.reading, online.slo)
    return OfQuantile(online.slo.quantile, latency_ns, online.slo.target_ns, slack)


def effect_line(effect: EffectRecord) -> bytes:
    """One line of JSON."""
    record: dict[str, Any] = {"kind": "effect", **asdict(effect)}
    return as_line(record)


def _info(workload: Workload, about: str | None) -> ContainerInfo:
    classification = workload.classification
    rule = classification.rule.name if classification.rule else None
    return ContainerInfo.of(workload.container, classification.role.value, rule, about or classification.reason)
