# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The enforcing half of the agent, put together on top of an observer.

Only an agent that enforces owns the run directory; whoever does not leaves alone what another one holds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from agent import layout
from agent.collectors.deliveries import Deliveries
from agent.model import ContainerKey
from agent.observer import Observer
from enforce.actuators.evict import Evict
from enforce.actuators.freeze import Freeze
from enforce.actuators.pace import Pace
from enforce.climber import Climber
from enforce.decisions import DecisionLog
from enforce.explain.history import History
from enforce.explainer import Explainer
from enforce.gates import GateReader
from enforce.holds import Holds
from enforce.ledger import Ledger
from enforce.loop import Loop
from enforce.model import Rung, Signal
from enforce.mps_clients import AnyMps
from enforce.owner import Owner, enforcing_elsewhere
from enforce.policy.model import Policy
from enforce.release import release_all
from enforce.report import PauseMeter
from enforce.rungs import Rungs
from enforce.signalling import signals
from enforce.supervisor import Supervisor

_log = logging.getLogger(__name__)


class Enforcement:
    """A context manager: inside it the loop decides, and acts if the policy says `enforce: true`."""

    def __init__(self, policy: Policy, observer: Observer, run_dir: Path, decisions: str, history: History) -> None:
        self._policy, self._observer, self._history = policy, observer, history
        self._run_dir = run_dir
        self._ledger_path = run_dir / "ledger.jsonl"
        self._decisions = decisions
        self._ending = threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            supervisor, holds, rungs = None, None, None
            table = rungs_of(self._observer)
            stack.callback(closed, table)
            if self._policy.enforce:
                owner = Owner.take(self._run_dir, self._observer.proc)
                stack.callback(owner.close)
                self._release_left_over()
                ledger = Ledger(self._ledger_path)
                stack.callback(ledger.close)
                supervisor = Supervisor(self._observer.probes, self._ledger_path, self._policy.tuning, (owner.fd,))
                supervisor.start()
                stack.callback(supervisor.stop)
                holds = Holds(Pace(self._observer.probes.map("rules")), ledger, self._observer.proc)
                rungs = Rungs(table, ledger)
            elif (other := enforcing_elsewhere(self._run_dir, self._observer.proc)) is not None:
                _log.warning("process %d enforces with %s: what it holds is left alone", other, self._run_dir)
            else:
                self._release_left_over()
            log = DecisionLog(self._decisions)
            stack.callback(log.close)
            self._history.has_policy, self._history.enforcing = True, self._policy.enforce
            climber = Climber(table, rungs)
            explainer = climber.explained(Explainer(log, self._history, acts=self._policy.enforce))
            others = self._observer.losses
            self._observer.losses = lambda: {**others(), **explainer.losses(), **climber.losses()}
            stack.callback(setattr, self._observer, "losses", others)
            known = stack.enter_context(signals(self._policy, self._observer))
            loop = deciding(self._policy, self._observer, known, holds, supervisor, explainer, climber)
            thread = threading.Thread(target=loop.run, args=(self._ending,), name="enforce", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._ending.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._history.has_policy = self._history.enforcing = False

    def _release_left_over(self) -> None:
        left_over = release_all(self._ledger_path)
        if left_over:
            _log.warning("released %d processes that an earlier agent left", len(left_over))


def rungs_of(observer: Observer) -> dict[str, Rung]:
    """The rungs beyond gate and pace; nothing is done to anybody yet."""

    def others(container: ContainerKey) -> frozenset[int]:
        members = observer.members.all()
        return frozenset(member.process.id.tgid for member in members if member.container.key != container)

    rungs: tuple[Rung, ...] = (Freeze(observer.proc, others), Evict(observer.proc, AnyMps(observer.proc)))
    return {rung.name: rung for rung in rungs}


def closed(table: Mapping[str, Rung]) -> None:
    """Ends the threads of those that have any."""
    for rung in table.values():
        if isinstance(rung, Freeze):
            rung.close()


def deciding(
    policy: Policy,
    observer: Observer,
    known: dict[str, Signal],
    holds: Holds | None,
    supervisor: Supervisor | None,
    explainer: Explainer,
    climber: Climber,
) -> Loop:
    """The loop, not yet running. Without holds and supervisor it touches nothing."""
    probes = observer.probes
    observer.pipeline.enforcing = supervisor is not None
    return Loop(
        policy=policy,
        pipeline=observer.pipeline,
        members=observer.members,
        signals=known,
        deliveries=Deliveries(probes),
        holds=holds,
        supervisor=supervisor,
        explainer=explainer,
        meter=PauseMeter(probes.map("paces"), probes.map("resumes")),
        gates=GateReader(probes.map("gates").share(layout.SLOTS), policy.tuning.gate_hold_ns),
        climber=climber,
    )
