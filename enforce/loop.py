# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The loop: ten times a second observe → decide → actuate → record.

Where a decision would only repeat the last one, it waits for the next tick: no online container has a latency, no
request of one has begun, no process has come, and no rung is in force (`_is_settled`). Where decisions are long, as
there are many processes, they are made less often: the thread takes no more than WORK_RATIO of a core as long as that
means no rest of more than LONGEST_REST_NS. A process that comes ends the rest.

It is the only place that catches everything; then it releases every throttle before it goes on. Nothing is written
before it is in the ledger, and nothing at all with `enforce: false`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.model import Snapshot
from agent.core.worker import Worker
from agent.pipeline import EnforcementReport, Pipeline
from enforce.actuators.executor import RungExecutor, RungRegistry
from enforce.actuators.launch.ledgered_rules import LaunchRules
from enforce.actuators.launch.levels import changes
from enforce.actuators.launch.pace import Links
from enforce.audit.recorder import DecisionRecorder
from enforce.audit.status import ContainerFigures, PauseMeter, described_copies, launch_seconds, statuses
from enforce.controller.deadlines import DeadlineMonitor
from enforce.controller.decision import NO_DECISIONS, DecisionInputs, Decisions, ShareDecision, decide
from enforce.controller.escalation import Escalation, UnprobedRungs, evictions_for_health
from enforce.controller.inputs import InputReader
from enforce.device_health import published
from enforce.memory.controller import MemoryController, MemoryOutcome
from enforce.memory.quotas import MemoryQuotas
from enforce.model import Signal
from enforce.policy.model import Policy, Role
from enforce.recovery.supervisor import Supervisor

_log = logging.getLogger(__name__)
WORK_RATIO: Final = 0.05  # of a core
LONGEST_REST_NS: Final = 400_000_000


@dataclass(frozen=True, slots=True)
class Actuation:
    """What writes: the guardian's heartbeat, launch rules, memory quotas, rungs."""

    supervisor: Supervisor
    launch_rules: LaunchRules
    links: Links
    quotas: MemoryQuotas
    executor: RungExecutor


@dataclass(frozen=True, slots=True)
class Controls:
    """What decisions act through. Without `actuation` (`enforce: false`) the others only say what they would do."""

    rungs: RungRegistry
    escalation: Escalation
    memory: MemoryController
    actuation: Actuation | None
    unprobed: UnprobedRungs = field(default_factory=UnprobedRungs)


@dataclass(frozen=True, slots=True)
class Audit:
    """What becomes known of decisions: the recorder writes them, the meters say how long processes were stopped and
    whether deadlines were met."""

    recorder: DecisionRecorder
    meter: PauseMeter
    deadlines: DeadlineMonitor


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """One decision. Each stage returns it with its own part filled in."""

    now_ns: int
    snapshot: Snapshot
    inputs: DecisionInputs = field(default_factory=lambda: DecisionInputs({}, {}, {}))  # by observe
    decisions: Decisions = NO_DECISIONS  # by decide
    memory: MemoryOutcome = field(default_factory=lambda: MemoryOutcome({}, {}, ()))  # by actuate


@dataclass(slots=True)
class Loop:
    """Decides, one step at a time; `deciding` runs it in a thread."""

    policy: Policy
    pipeline: Pipeline
    inputs: InputReader
    controls: Controls
    audit: Audit
    failures: int = field(init=False, default=0)
    _last: Decisions = field(init=False, default=NO_DECISIONS)
    _rest: tuple[int, object] = field(init=False, default=(0, None))  # until when, while these are the processes
    _settled: tuple[Snapshot, tuple[object, ...]] | None = field(init=False, default=None)  # what it was decided from

    @property
    def interval_seconds(self) -> float:
        """Between the end of a decision and the next one."""
        return self.policy.tuning.decide_interval_ns / NS_PER_SECOND

    def begin(self) -> None:
        """Publishes that decisions are made from now on."""
        acts = self.controls.actuation is not None
        self.pipeline.publish(EnforcementReport(enforcing=acts, decided_ns=monotonic_ns()))

    def decide(self) -> float:
        """One decision; the seconds until the next. If it fails, everything is released."""
        self._guarded(self._decide_and_publish)
        return self.interval_seconds

    def end(self) -> None:
        """No more decisions: releases everything, and waits for it."""
        # However long releasing takes, it is no decision that hangs.
        self.pipeline.publish(replace(self.pipeline.enforcement, decided_ns=None))
        self._release()
        self._guarded(self.controls.escalation.release)

    def losses(self) -> dict[str, int]:
        """What failed, was dropped or was changed by another writer: for Snapshot.lost."""
        controls = self.controls
        return {
            "loop:failed": self.failures,
            **self.inputs.losses(),
            **self.audit.recorder.losses(),
            **(controls.actuation.supervisor.losses() if controls.actuation else {}),
            **(controls.actuation.launch_rules.losses() if controls.actuation else {}),
            **(controls.actuation.quotas.losses() if controls.actuation else {}),
            **controls.escalation.losses(),
            **controls.rungs.losses(),
        }

    def step(self) -> EnforcementReport:
        """One decision: observe → decide → actuate → record. Before the first snapshot there is nothing to decide."""
        now_ns = monotonic_ns()
        if self.controls.actuation:
            self.controls.actuation.supervisor.beat()
        snapshot = self.pipeline.snapshot
        if snapshot is None:
            return self.pipeline.enforcement
        changing = self.inputs.changing()
        if now_ns < self._rest[0] and changing[:1] == self._rest[1]:
            return self.pipeline.enforcement
        if self._settled is not None and self._settled[0] is snapshot and self._settled[1] == changing:
            return self.pipeline.enforcement
        self._settled = None  # should this one fail
        began_ns = time.thread_time_ns()
        context = DecisionContext(now_ns, snapshot)
        context = self._observe(context)
        context = self._decide(context)
        context = self._actuate(context)
        report = self._record(context)
        if self._is_settled(context, report):
            self._settled = snapshot, changing
        rest_ns = min(LONGEST_REST_NS, round((time.thread_time_ns() - began_ns) * (1 / WORK_RATIO - 1)))
        if rest_ns > self.policy.tuning.decide_interval_ns:
            self._rest = monotonic_ns() + rest_ns, changing[:1]
        return report

    def _is_settled(self, context: DecisionContext, report: EnforcementReport) -> bool:
        """Whether until the next tick, as long as `changing` stays, decisions would be the same."""
        inputs, memory = context.inputs, context.memory
        waits = memory.wishes or memory.decisions or any(one.rungs for one in report.containers.values())
        periodic = any(one.classification.role is Role.PERIODIC for one in inputs.workloads.values())
        return not (inputs.readings or waits or periodic)

    def _observe(self, context: DecisionContext) -> DecisionContext:
        shares = {one.workload.container.key: one.share.ratio for one in self._last.shares}
        counters = self.audit.meter.counters
        return replace(context, inputs=self.inputs.read(context.snapshot, counters, shares, context.now_ns))

    def _decide(self, context: DecisionContext) -> DecisionContext:
        states = {one.workload.container.key: one.state for one in self._last.shares}
        decisions = decide(context.inputs, states, self.policy.tuning, context.now_ns)
        copies = described_copies(context.inputs, self.policy.pcie, context.snapshot.devices)
        self._last = replace(with_troubles(decisions, self.inputs.latencies.signals), copies=copies)
        return replace(context, decisions=self._last)

    def _actuate(self, context: DecisionContext) -> DecisionContext:
        """Launch rules at once; what memory, health and MPS faults ask for, by the ladder."""
        inputs, now_ns, controls = context.inputs, context.now_ns, self.controls
        if controls.actuation:
            rules = controls.actuation.launch_rules
            controls.actuation.links.set_speeds(self.policy.pcie, context.snapshot.devices, inputs.slots)
            rules.perform(changes(context.decisions.levels, rules.in_force()))
            rules.disown(inputs.spared)
            self.inputs.latencies.announce(inputs.workloads, inputs.slots)
        memory = controls.memory.step(context.snapshot, inputs.workloads, inputs.slots, now_ns)
        faults = controls.rungs.look(inputs.workloads, context.snapshot)
        others = (memory.wishes, evictions_for_health(inputs.workloads, inputs.health), faults)
        controls.escalation.look(self.audit.meter.foreign(), now_ns)
        unprobed = controls.unprobed.step(context.snapshot, inputs, now_ns)
        controls.escalation.step(inputs.workloads, context.decisions, now_ns, others, unprobed)
        return replace(context, memory=memory)

    def _record(self, context: DecisionContext) -> EnforcementReport:
        """To the decision log and the history; the report is for the snapshot."""
        inputs, decisions, memory = context.inputs, context.decisions, context.memory
        recorder = self.audit.recorder
        paused = self.audit.meter.read(inputs.workloads, context.now_ns)
        recorder.record(inputs.workloads, decisions, inputs.readings, paused, context.now_ns)
        for act in memory.decisions:
            recorder.record_memory(act)
        deadlines = self.audit.deadlines
        periodic = deadlines.step(inputs, decisions.levels, context.now_ns)
        figures = ContainerFigures(
            paused=paused,
            escalation={key: self.controls.escalation.status(key) for key in inputs.workloads},
            memory=memory.statuses,
            requests={key: self.inputs.latencies.counted(key) for key in inputs.workloads},
            launch_seconds=launch_seconds(inputs),
            periodic=periodic,
            deadlines=deadlines.texts,
        )
        return EnforcementReport(
            enforcing=self.controls.actuation is not None,
            containers=statuses(inputs, decisions, figures),
            device_health=published(inputs.health, context.now_ns),
            online=self.inputs.online(inputs.slots, context.now_ns),
            left_rules=self.inputs.left_rules(),
        )

    def _decide_and_publish(self) -> None:
        began_ns = monotonic_ns()
        report, now_ns = self.step(), monotonic_ns()
        is_new = report is not self.pipeline.enforcement
        seconds = (now_ns - began_ns) / NS_PER_SECOND if is_new else report.decision_seconds
        self.pipeline.publish(replace(report, decided_ns=now_ns, decision_seconds=seconds))

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001
            self.failures += 1
            _log.exception("a decision failed: releasing everything")
            self._release()

    def _release(self) -> None:
        """Each on its own: what one cannot release must not keep another one held."""
        controls = self.controls
        for release in (
            *((controls.actuation.launch_rules.release_all,) if controls.actuation else ()),
            controls.memory.release,
            controls.escalation.begin_release,
        ):
            try:
                release()
            except Exception:  # noqa: BLE001
                self.failures += 1
                _log.exception("releasing failed; the guardian and `gpuwarden release` can still do it")


@contextmanager
def deciding(loop: Loop, thread_name: str) -> Iterator[None]:
    """Inside the block the loop decides, in a thread of its own; at its end everything is released."""
    worker = Worker(thread_name, loop.decide, failed="a decision", first_seconds=loop.interval_seconds)
    loop.begin()
    try:
        worker.start()
        yield
    finally:
        worker.close()
        loop.end()


def with_troubles(decisions: Decisions, signals: Mapping[str, Signal]) -> Decisions:
    """The same decisions; one without a reading says why there is none, where the signal knows."""
    return replace(decisions, shares=tuple(_with_trouble(one, signals) for one in decisions.shares))


def _with_trouble(decision: ShareDecision, signals: Mapping[str, Signal]) -> ShareDecision:
    ruler = decision.ruler
    trouble = signals[ruler.slo.signal].trouble(ruler.container) if ruler.reading is None else None
    if trouble is None:
        return decision
    reason = f"{decision.share.reason} (signal {ruler.slo.signal}: {trouble})"
    return replace(decision, share=replace(decision.share, reason=reason))
