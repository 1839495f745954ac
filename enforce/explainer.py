# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Says why: each decision to the log and to the history of the last hour, and a window later what it brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.clock import NS_PER_SECOND, wall_ns
from agent.model import ContainerKey
from enforce.decide import Decided, Verdict, slack_ratio
from enforce.decisions import Decision, DecisionLog, as_line
from enforce.effects import Awaited, Effect, Effects
from enforce.explain.history import History
from enforce.explain.model import Brought, Who
from enforce.memory.told import MemoryDecision
from enforce.model import Reading
from enforce.policy.model import OfflineRule, OnlineRule
from enforce.report import Paused
from enforce.roster import Seat

_SEE_NS = NS_PER_SECOND
_IN_KERNEL = ("gate", "pace")  # rungs that a level puts in force, and not enforce.rungs
_NEVER_PAUSED = Paused(0, 0.0, None)
Readings = Mapping[ContainerKey, Reading]


@dataclass(slots=True)
class Explainer:
    """Called by the deciding thread alone, once per decision."""

    log: DecisionLog
    history: History
    acts: bool
    in_force: Callable[[ContainerKey], frozenset[str]] = lambda key: frozenset()  # rungs beyond pace and gate
    troubles: Callable[[ContainerKey], Mapping[str, str]] = lambda key: {}
    also: Callable[[ContainerKey], Sequence[str]] = lambda key: ()  # reasons beside the law's: of memory, of health
    effects: Effects = field(default_factory=Effects)
    _seen_ns: int | None = None
    _last: dict[ContainerKey, Decision] = field(default_factory=dict)

    def tell(
        self,
        here: Mapping[ContainerKey, Seat],
        decided: Decided,
        readings: Readings,
        paused: Mapping[ContainerKey, Paused],
        now_ns: int,
    ) -> None:
        """What was decided now, and what earlier decisions have brought."""
        if self._seen_ns is None or now_ns - self._seen_ns >= _SEE_NS:
            self._seen_ns = now_ns
            self.history.see([_who(seat) for seat in here.values()], now_ns)
        for key, seat in here.items():
            if isinstance(rule := seat.classification.rule, OnlineRule):
                self.history.promised(key, rule, readings.get(key), now_ns)
        last, self._last = self._last, {}
        for verdict in decided.verdicts:
            key = verdict.seat.container.key
            decision = self._decision(verdict, here, last.get(key), paused.get(key, _NEVER_PAUSED))
            self._last[key] = decision
            self.history.decided(decision, now_ns)
            if self.log.write(decision):
                self.effects.expect(decision, verdict.ruler.slo.window_ns, now_ns)
        for key, seat in here.items():
            if key not in self._last and (unruled := self._unruled(seat, paused.get(key, _NEVER_PAUSED))) is not None:
                self.history.decided(unruled, now_ns)
                self.log.write(unruled)
        for awaited in self.effects.due(now_ns):
            self._follow(awaited, readings.get(ContainerKey(awaited.decision.ruler)))

    def tell_memory(self, told: MemoryDecision) -> None:
        """What was done for memory's sake."""
        if self.log.write(told):
            self.history.for_memory.append(told)

    def losses(self) -> dict[str, int]:
        """What could not be told or remembered, for Snapshot.lost."""
        return {
            "decisions:dropped": self.log.dropped,
            "decisions:unwritten": self.log.errors,
            "effects:skipped": self.effects.skipped,
            "history:crowded_out": self.history.crowded_out,
        }

    def _decision(
        self, verdict: Verdict, here: Mapping[ContainerKey, Seat], before: Decision | None, paused: Paused
    ) -> Decision:
        container, ruler, reading = verdict.seat.container, verdict.ruler, verdict.ruler.reading
        online = here.get(ruler.container)
        return Decision(
            wall_ns=wall_ns(),
            container=str(container.key),
            device=str(ruler.device),
            rule=verdict.rule.name,
            law=verdict.rule.law,
            latency_ns=None if reading is None else reading.latency_ns,
            samples=0 if reading is None else reading.samples,
            quantile=ruler.slo.quantile,
            target_ns=ruler.slo.target_ns,
            slack_ratio=slack_ratio(reading, ruler.slo.target_ns),
            share_before=None if before is None else before.share_after,
            share_after=verdict.share.ratio,
            max_queued_ns=verdict.share.max_queued_ns,
            reason="; ".join((verdict.share.reason, *self.also(container.key))),
            acted=self.acts,
            max_queued_before_ns=None if before is None else before.max_queued_ns,
            name=container.name,
            pod=container.pod,
            namespace=container.namespace,
            ruler=str(ruler.container),
            ruler_name=str(ruler.container) if online is None else online.container.name,
            rungs=self._rungs(container.key, verdict.rule, _IN_KERNEL if self.acts else ()),
            troubles=dict(self.troubles(container.key)),
            pauses=paused.pauses,
            paused_seconds=paused.seconds,
        )

    def _unruled(self, seat: Seat, paused: Paused) -> Decision | None:
        """What is done to an offline container for nobody's latency; None: nothing is."""
        container, rule = seat.container, seat.classification.rule
        if not isinstance(rule, OfflineRule):
            return None
        reasons, rungs = self.also(container.key), self._rungs(container.key, rule, ())
        if not reasons and not rungs:
            return None
        return Decision(
            wall_ns=wall_ns(),
            container=str(container.key),
            device=min(seat.devices, default=""),
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
        """In the ladder's order; those that no ladder names come last."""
        in_force = self.in_force(key)
        named = tuple(rung for rung in rule.ladder if rung in in_force or rung in kernel)
        return (*named, *sorted(in_force - set(rule.ladder)))

    def _follow(self, awaited: Awaited, reading: Reading | None) -> None:
        decision = awaited.decision
        latest = self._last.get(ContainerKey(decision.container))
        latency = None if reading is None else reading.latency_ns
        slack = slack_ratio(reading, decision.target_ns)
        paused = None if latest is None else latest.paused_seconds - decision.paused_seconds
        effect = Effect(
            wall_ns=wall_ns(),
            container=decision.container,
            device=decision.device,
            ruler=decision.ruler,
            decision_wall_ns=decision.wall_ns,
            window_ns=awaited.window_ns,
            latency_ns=latency,
            samples=0 if reading is None else reading.samples,
            target_ns=decision.target_ns,
            slack_ratio=slack,
            share=None if latest is None else latest.share_after,
            max_queued_ns=None if latest is None else latest.max_queued_ns,
            paused_ratio=None if paused is None else min(1.0, max(0.0, paused / (awaited.window_ns / 1e9))),
        )
        self.log.follow(effect_line(effect))
        before = (decision.latency_ns, latency, decision.slack_ratio, slack)
        self.history.brought(decision.container, Brought(awaited.decided_ns, awaited.window_ns, *before))


def effect_line(effect: Effect) -> bytes:
    """One line of JSON."""
    record: dict[str, Any] = {"kind": "effect", **asdict(effect)}
    return as_line(record)


def _who(seat: Seat) -> Who:
    rule = seat.classification.rule
    said = seat.classification
    return Who.of(seat.container, said.role.value, rule.name if rule else None, said.reason)
