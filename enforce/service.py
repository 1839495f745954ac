# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcing half of the agent, put together on top of an observer.

Only an agent that enforces owns the run directory; one that does not leaves alone what another agent holds there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from agent.collectors.launches import DeliverySamples
from agent.node import preflight
from agent.observer import Observer
from agent.probes import abi
from agent.probes.return_probes import no_returns
from enforce.actuators.executor import RungExecutor, RungRegistry
from enforce.actuators.launch.ledgered_rules import LaunchRules
from enforce.actuators.launch.pace import GateReader, Links, PaceRules
from enforce.actuators.undo import release_all
from enforce.audit.decision_log import DecisionLog
from enforce.audit.history import DecisionHistory
from enforce.audit.recorder import DecisionRecorder
from enforce.audit.status import PauseMeter
from enforce.controller.deadlines import DeadlineMonitor
from enforce.controller.escalation import Escalation
from enforce.controller.inputs import InputReader, LatencyReader, LaunchReader
from enforce.device_health import SysMonitor
from enforce.ledger.ledger import Ledger
from enforce.ledger.run_lock import RunDirLock, enforcing_elsewhere
from enforce.loop import Actuation, Audit, Controls, Loop, deciding
from enforce.memory.controller import MemoryController
from enforce.memory.quotas import MemoryQuotas
from enforce.model import Signal
from enforce.policy.model import Policy
from enforce.recovery.supervisor import Supervisor
from enforce.signals.latency_window import Requests
from enforce.signals.registry import signals
from enforce.workloads import Memberships, Roles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnforcementSettings:
    """What stays the same from policy to policy. `decisions`: where the decision log goes, as DecisionLog takes it."""

    run_dir: Path
    decisions: str
    history: DecisionHistory
    health: SysMonitor
    memberships: Memberships = field(default_factory=Memberships)

    @property
    def ledger_path(self) -> Path:
        """The write-ahead log of acts."""
        return self.run_dir / "ledger.jsonl"


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a loop is made of beside policy and observer. Without `actuation` it changes nothing."""

    signals: Mapping[str, Signal]
    requests: Requests
    rungs: RungRegistry
    log: DecisionLog
    history: DecisionHistory
    health: SysMonitor
    actuation: Actuation | None = None
    memberships: Memberships = field(default_factory=Memberships)


class EnforcementService:
    """A context manager: inside it the loop decides, and acts if the policy says `enforce: true`."""

    def __init__(self, policy: Policy, observer: Observer, settings: EnforcementSettings) -> None:
        self._policy, self._observer, self._settings = policy, observer, settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        acts = self._policy.enforce and _may_resume()
        settings, observer = self._settings, self._observer
        with ExitStack() as stack:
            lock = self._own_run_dir(stack) if acts else None
            if lock is None:
                self._leave_run_dir_alone()
            ledger = self._ledger(stack) if lock is not None else None
            log = DecisionLog(settings.decisions)
            stack.callback(log.close)
            stack.callback(settings.history.set_policy, has_policy=False, enforcing=False)
            settings.history.set_policy(has_policy=True, enforcing=acts)
            requests = Requests()
            known = stack.enter_context(signals(self._policy, observer, requests))
            rungs = RungRegistry.of(observer, ledger)
            stack.callback(rungs.close)
            actuation = None if lock is None or ledger is None else self._actuation(lock, ledger, rungs, stack)
            history, health, memberships = settings.history, settings.health, settings.memberships
            memberships.begin(self._policy)
            parts = LoopParts(known, requests, rungs, log, history, health, actuation, memberships)
            loop = loop_of(self._policy, observer, parts)
            stack.enter_context(observer.losses.register("enforcement", loop.losses))
            stack.enter_context(deciding(loop, "enforce"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _own_run_dir(self, stack: ExitStack) -> RunDirLock:
        lock = RunDirLock.take(self._settings.run_dir, self._observer.proc)
        stack.callback(lock.close)
        self._release_left_over()
        return lock

    def _ledger(self, stack: ExitStack) -> Ledger:
        ledger = Ledger(self._settings.ledger_path)
        stack.callback(ledger.close)
        return ledger

    def _actuation(self, lock: RunDirLock, ledger: Ledger, rungs: RungRegistry, stack: ExitStack) -> Actuation:
        """Starts the guardian, which inherits the lock of the run directory."""
        observer = self._observer
        supervisor = Supervisor(observer.probes, self._settings.ledger_path, self._policy.tuning, (lock.fd,))
        stack.callback(supervisor.stop)  # also of a guardian that was started before `start` failed
        supervisor.start()
        rules, payers, controls = (observer.probes.map(name) for name in ("rules", "payers", "controls"))
        pace = PaceRules(rules, payers, controls.share(1)[0])
        return Actuation(
            supervisor=supervisor,
            launch_rules=LaunchRules(pace, ledger, observer.proc),
            links=Links(observer.probes.map("links").share(abi.LINKS)),
            quotas=MemoryQuotas(observer.probes.map, ledger, observer.proc),
            executor=RungExecutor(rungs.table, ledger),
        )

    def _leave_run_dir_alone(self) -> None:
        """Releases what an agent that is gone left; what an agent that runs holds is its own."""
        run_dir = self._settings.run_dir
        other = enforcing_elsewhere(run_dir, self._observer.proc)
        if other is None:
            self._release_left_over()
        else:
            _log.warning("process %d enforces with %s: what it holds is left alone", other, run_dir)

    def _release_left_over(self) -> None:
        left_over = release_all(self._settings.ledger_path)
        if left_over:
            _log.warning("released %d processes that an earlier agent left", len(left_over))


def _may_resume() -> bool:
    """Whether this agent can resume what it stops; without that it must not stop anything."""
    if not preflight.has_the_nodes_pids():
        _log.error("the policy says enforce: true, and nothing is enforced: %s", preflight.OTHER_PIDS)
        return False
    if not preflight.holds("CAP_KILL"):
        _log.error("the policy says enforce: true, and nothing is enforced: CAP_KILL is missing; %s", preflight.CURE)
        return False
    return True


def loop_of(policy: Policy, observer: Observer, parts: LoopParts) -> Loop:
    """The loop, not yet running."""
    probes, actuation, rungs = observer.probes, parts.actuation, parts.rungs
    executor = actuation.executor if actuation else None
    quotas = actuation.quotas if actuation else None
    escalation = Escalation(rungs.table, executor, no_returns(probes.returns_off))
    deadlines = DeadlineMonitor(probes.map("periodics"), enforced=actuation is not None)
    recorder = DecisionRecorder(
        parts.log,
        parts.history,
        acts=actuation is not None,
        in_force=lambda key: frozenset(escalation.status(key).rungs),
        troubles=lambda key: escalation.status(key).troubles,
        reasons=escalation.reasons,
        about=lambda key: deadlines.texts.get(key),
    )
    gates = GateReader(probes.map("gates").share(abi.SLOTS), policy.tuning.gate_hold_ns)
    launches = LaunchReader(DeliverySamples(probes), gates)
    latencies = LatencyReader(parts.signals, parts.requests)
    memory = MemoryController(policy, probes.map("resumes"), rungs.table, quotas, executor)
    return Loop(
        policy=policy,
        pipeline=observer.pipeline,
        inputs=InputReader(Roles(policy, parts.memberships), observer.members, latencies, launches, parts.health),
        controls=Controls(rungs, escalation, memory, actuation),
        audit=Audit(recorder, PauseMeter(probes.map("paces"), probes.map("resumes")), deadlines),
    )
