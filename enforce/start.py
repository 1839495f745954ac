# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcing half of the agent, put together on top of an observer.

Only an agent that enforces owns the run directory; whoever does not leaves alone what another one holds.
"""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from agent import capabilities, layout, preflight
from agent.collectors.deliveries import Deliveries
from agent.observer import Observer
from enforce.actuators.pace import Pace
from enforce.climber import Climber
from enforce.decisions import DecisionLog
from enforce.explain.history import History
from enforce.explainer import Explainer
from enforce.gates import GateReader
from enforce.holds import Holds
from enforce.ledger import Ledger
from enforce.loop import Hands, Loop
from enforce.memory.bounds import Bounds
from enforce.memory.keeper import Keeper
from enforce.model import Signal
from enforce.owner import Owner, enforcing_elsewhere
from enforce.policy.model import Policy
from enforce.release import release_all
from enforce.report import PauseMeter
from enforce.rungs import Rungs
from enforce.signalling import signals
from enforce.signals.requests import Requests
from enforce.supervisor import Supervisor
from enforce.sysmonitor import SysMonitor
from enforce.toolbox import Toolbox

_log = logging.getLogger(__name__)


class Enforcement:
    """A context manager: inside it the loop decides, and acts if the policy says `enforce: true`."""

    def __init__(
        self,
        policy: Policy,
        observer: Observer,
        run_dir: Path,
        decisions: str,
        history: History,
        health: SysMonitor,
    ) -> None:
        self._policy, self._observer, self._history, self._health = policy, observer, history, health
        self._run_dir = run_dir
        self._ledger_path = run_dir / "ledger.jsonl"
        self._decisions = decisions
        self._ending = threading.Event()
        self._guarded_by: tuple[int, ...] = ()  # descriptors that the guardian is to inherit
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        acts = self._policy.enforce and _may_resume()
        with ExitStack() as stack:
            ledger = self._own(stack) if acts else None
            if ledger is None:
                self._leave_alone()
            log = DecisionLog(self._decisions)
            stack.callback(log.close)
            stack.callback(self._tell_history, has_policy=False, enforcing=False)
            self._tell_history(has_policy=True, enforcing=acts)
            explainer = Explainer(log, self._history, acts=acts)
            requests = Requests()
            known = stack.enter_context(signals(self._policy, self._observer, requests))
            tools = Toolbox.of(self._observer, ledger)
            stack.callback(tools.close)
            hands = self._hands(ledger, tools, stack) if ledger is not None else None
            loop = deciding(self._policy, self._observer, known, requests, tools, hands, explainer, self._health)
            others = self._observer.losses
            self._observer.losses = lambda: {**others(), **loop.losses()}
            stack.callback(setattr, self._observer, "losses", others)
            thread = threading.Thread(target=loop.run, args=(self._ending,), name="enforce", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._ending.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _tell_history(self, has_policy: bool, enforcing: bool) -> None:
        self._history.has_policy, self._history.enforcing = has_policy, enforcing

    def _own(self, stack: ExitStack) -> Ledger:
        owner = Owner.take(self._run_dir, self._observer.proc)
        stack.callback(owner.close)
        self._release_left_over()
        ledger = Ledger(self._ledger_path)
        stack.callback(ledger.close)
        self._guarded_by = (owner.fd,)
        return ledger

    def _hands(self, ledger: Ledger, tools: Toolbox, stack: ExitStack) -> Hands:
        observer = self._observer
        supervisor = Supervisor(observer.probes, self._ledger_path, self._policy.tuning, self._guarded_by)
        supervisor.start()
        stack.callback(supervisor.stop)
        holds = Holds(Pace(observer.probes.map("rules")), ledger, observer.proc)
        bounds = Bounds(observer.probes.map, ledger, observer.proc)
        return Hands(supervisor, holds, bounds, Rungs(tools.table, ledger))

    def _leave_alone(self) -> None:
        other = enforcing_elsewhere(self._run_dir, self._observer.proc)
        if other is None:
            self._release_left_over()
        else:
            _log.warning("process %d enforces with %s: what it holds is left alone", other, self._run_dir)

    def _release_left_over(self) -> None:
        left_over = release_all(self._ledger_path)
        if left_over:
            _log.warning("released %d processes that an earlier agent left", len(left_over))


def _may_resume() -> bool:
    """Who cannot resume must not stop anybody."""
    if not preflight.has_the_nodes_pids():
        _log.error("the policy says enforce: true, and nothing is enforced: %s", preflight.OTHER_PIDS)
        return False
    if not capabilities.holds("CAP_KILL"):
        _log.error("the policy says enforce: true, and nothing is enforced: CAP_KILL is missing; %s", capabilities.CURE)
        return False
    return True


def deciding(
    policy: Policy,
    observer: Observer,
    known: dict[str, Signal],
    requests: Requests,
    tools: Toolbox,
    hands: Hands | None,
    explainer: Explainer,
    health: SysMonitor,
) -> Loop:
    """The loop, not yet running. Without hands it touches nothing."""
    probes = observer.probes
    climber = Climber(tools.table, hands.rungs if hands else None)
    observer.pipeline.enforcing = hands is not None
    return Loop(
        policy=policy,
        pipeline=observer.pipeline,
        members=observer.members,
        signals=known,
        requests=requests,
        deliveries=Deliveries(probes),
        hands=hands,
        tools=tools,
        climber=climber,
        explainer=climber.explained(explainer),
        meter=PauseMeter(probes.map("paces"), probes.map("resumes")),
        health=health,
        memory=Keeper(
            policy,
            probes.map("resumes"),
            tools.table,
            hands.bounds if hands else None,
            hands.rungs if hands else None,
        ),
        gates=GateReader(probes.map("gates").share(layout.SLOTS), policy.tuning.gate_hold_ns),
    )
