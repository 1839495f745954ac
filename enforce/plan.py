# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden plan`: what would be done now, by a loop that has nothing to do it with.

Nothing of a running agent is touched: not its ledger, run directory, socket or guardian; the probes and maps here are
this process's own. For the same reason a plan beside an enforcing agent sees a node that is already held.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO

from agent.errors import SetupError
from agent.model import ContainerKey, Enforcement, Snapshot
from agent.observer import Observer
from enforce.decisions import Decision, DecisionLog
from enforce.explain.history import History
from enforce.explainer import Explainer
from enforce.memory.told import MemoryDecision
from enforce.model import Rung, Subject
from enforce.policy.model import Policy
from enforce.roster import Seat, seats, subject_of
from enforce.signalling import signals
from enforce.signals.requests import Requests
from enforce.start import deciding
from enforce.sysmonitor import SysMonitor
from enforce.toolbox import Toolbox

_IN_KERNEL = ("gate", "pace")


@dataclass(frozen=True, slots=True)
class Planned:
    """One container: what it is, what would be decided, and what stands in a rung's way (rung → why; None: nothing)."""

    key: str
    name: str
    stance: Enforcement
    decision: Decision | None
    rungs: Mapping[str, str | None]


def plan(policy: Policy, observer: Observer, tools: Toolbox, seconds: float, as_json: bool, out: IO[str]) -> int:
    """Watches for a while, then prints it: a table, or one line of JSON per container. SetupError: nothing to see."""
    planned = watch(replace(policy, enforce=False), observer, tools, seconds)
    if as_json:
        for one in planned:
            print(json.dumps(document(one)), file=out)
        return 0
    from enforce.explain.plan_table import show  # rich is slow to import

    show(planned, policy.enforce, out)
    return 0


def document(one: Planned) -> dict[str, object]:
    """A line of JSON: what enforcement would publish about the container, and what it would decide."""
    decision = None if one.decision is None else asdict(one.decision)
    head = {"container": one.name, "key": one.key}
    return {**head, **asdict(one.stance), "decision": decision, "ladder": dict(one.rungs)}


def watch(policy: Policy, observer: Observer, tools: Toolbox, seconds: float) -> list[Planned]:
    """Decides for so many seconds without acting; the last decisions."""
    latest, requests = _Latest(), Requests()
    ending = threading.Event()
    with signals(policy, observer, requests) as known:
        explainer = Explainer(latest, History(), acts=False)
        loop = deciding(policy, observer, known, requests, tools, None, explainer, SysMonitor())
        thread = threading.Thread(target=loop.run, args=(ending,), name="plan", daemon=True)
        thread.start()
        try:
            time.sleep(seconds)
        finally:
            ending.set()
            thread.join()
            latest.close()
    snapshot = observer.snapshot()
    if snapshot is None or (loop.failures and not observer.pipeline.enforcement):
        raise SetupError("nothing was observed in that time: give more --seconds")
    return _planned(policy, observer, snapshot, latest.decisions, tools.table)


class _Latest(DecisionLog):
    """Keeps the last decision of each container, and writes nothing."""

    def __init__(self) -> None:
        super().__init__("")
        self.decisions: dict[str, Decision] = {}

    def write(self, decision: Decision | MemoryDecision) -> bool:
        """Never told, so that nobody waits for an effect."""
        if isinstance(decision, Decision):
            self.decisions[decision.container] = decision
        return False


def _planned(
    policy: Policy,
    observer: Observer,
    snapshot: Snapshot,
    decisions: Mapping[str, Decision],
    rungs: Mapping[str, Rung],
) -> list[Planned]:
    found = []
    for key, seat in seats(policy, observer.members.all(), snapshot).items():
        stance = observer.pipeline.enforcement.get(key)
        if stance is not None:
            ladder = _ladder(seat, rungs)
            found.append(Planned(key, seat.container.name, stance, decisions.get(str(ContainerKey(key))), ladder))
    order = {"online": 0, "offline": 1}
    return sorted(found, key=lambda one: (order.get(one.stance.role, 2), one.name))


def _ladder(seat: Seat, rungs: Mapping[str, Rung]) -> dict[str, str | None]:
    subject = subject_of(seat)
    if subject is None:
        return {}
    return {name: _obstacle(rungs, name, subject) for name in subject.rule.ladder}


def _obstacle(rungs: Mapping[str, Rung], name: str, subject: Subject) -> str | None:
    if name in _IN_KERNEL:
        return None
    rung = rungs.get(name)
    return "not in this version" if rung is None else rung.obstacle(subject)
