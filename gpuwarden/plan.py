# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden plan`: what would be done now, by a loop that cannot act, as a table or JSON.

Nothing of a running agent is touched: not its ledger, run directory, socket or guardian; the probes and maps here are
this process's own. For the same reason a plan beside an enforcing agent sees a node that is already held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import IO, Final

from agent.core.errors import SetupError, UsageError
from agent.core.model import EnforcementStatus
from agent.core.text import quantile
from agent.observer import Observer
from enforce.actuators.executor import RungRegistry
from enforce.audit.decision_log import DecisionLog, DecisionRecord
from enforce.audit.history import DecisionHistory
from enforce.audit.model import shown
from enforce.audit.text import milliseconds_range, percent_range
from enforce.device_health import SysMonitor
from enforce.loop import deciding
from enforce.memory.accounts import MemoryDecision
from enforce.model import Rung, Subject
from enforce.policy.model import Policy
from enforce.reload import policy_file
from enforce.service import LoopParts, loop_of
from enforce.signals.latency_window import Requests
from enforce.signals.registry import signals
from enforce.workloads import Workload, subject_of, workloads_of
from gpuwarden.options import DEFAULT_POLICY, add_observing_arguments, observer_settings

_IN_KERNEL = ("gate", "pace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden plan`."""
    add_observing_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a line of JSON per container instead of a table")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of observing first (%(default)s)")


def act(options: argparse.Namespace) -> int:
    """Exit code 0. UsageError: no policy, or a time out of range."""
    if not 0.1 <= options.seconds <= 3600:
        raise UsageError(f"--seconds {options.seconds}: give seconds between 0.1 and 3600")
    file = policy_file(options.policy or DEFAULT_POLICY)
    if options.policy is None and not file.exists():
        raise UsageError(f"no policy to plan with: give --policy FILE, or write {DEFAULT_POLICY}")
    policy = file.load()
    with Observer(observer_settings(options)) as observer:
        planned = watch(replace(policy, enforce=False), observer, RungRegistry.of(observer, None), options.seconds)
    if options.json:
        for one in planned:
            print(json.dumps(document(one)))
        return 0
    show(planned, policy.enforce, sys.stdout)
    return 0


@dataclass(frozen=True, slots=True)
class Planned:
    """One container: its status, what would be decided, and the obstacle of each rung (rung → why; None: none)."""

    key: str
    name: str
    status: EnforcementStatus
    decision: DecisionRecord | None
    rungs: Mapping[str, str | None]


def document(one: Planned) -> dict[str, object]:
    """A line of JSON: what enforcement would publish about the container, and what it would decide."""
    decision = None if one.decision is None else asdict(one.decision)
    head = {"container": one.name, "key": one.key}
    return {**head, **asdict(one.status), "decision": decision, "ladder": dict(one.rungs)}


def watch(policy: Policy, observer: Observer, rungs: RungRegistry, seconds: float) -> list[Planned]:
    """Decides for so many seconds without acting; the last decisions. SetupError: nothing was observed."""
    latest, requests = _Latest(), Requests()
    with closing(latest), signals(policy, observer, requests) as known:
        loop = loop_of(policy, observer, LoopParts(known, requests, rungs, latest, DecisionHistory(), SysMonitor()))
        with deciding(loop, "plan"):
            time.sleep(seconds)
    snapshot, statuses = observer.snapshot(), observer.pipeline.enforcement.containers
    if snapshot is None or (loop.failures and not statuses):
        raise SetupError("nothing was observed in that time: give more --seconds")
    planned = []
    for key, workload in workloads_of(policy, observer.members.all(), snapshot).items():
        if (status := statuses.get(key)) is not None:
            decision, ladder = latest.decisions.get(str(key)), _ladder(workload, rungs.table)
            planned.append(Planned(key, workload.container.name, status, decision, ladder))
    order = {"online": 0, "offline": 1}
    return sorted(planned, key=lambda one: (order.get(one.status.role, 2), one.name))


class _Latest(DecisionLog):
    """Keeps the last decision of each container, and writes nothing."""

    def __init__(self) -> None:
        super().__init__("")
        self.decisions: dict[str, DecisionRecord] = {}

    def write(self, decision: DecisionRecord | MemoryDecision) -> bool:
        """No line is written, so no effect is waited for."""
        if isinstance(decision, DecisionRecord):
            self.decisions[decision.container] = decision
        return False


def _ladder(workload: Workload, rungs: Mapping[str, Rung]) -> dict[str, str | None]:
    subject = subject_of(workload)
    if subject is None:
        return {}
    return {name: _obstacle(rungs, name, subject) for name in subject.rule.ladder}


def _obstacle(rungs: Mapping[str, Rung], name: str, subject: Subject) -> str | None:
    if name in _IN_KERNEL:
        return None
    rung = rungs.get(name)
    return "not in this version" if rung is None else rung.obstacle(subject)


COLUMNS: Final = ("CONTAINER", "ROLE", "RULE", "FOR", "LATENCY/TARGET", "SLACK", "SHARE", "QUEUE")


def cells(one: Planned) -> tuple[str, ...]:
    """The container's line. A dash: there is none, or it is unknown."""
    status, decision = one.status, one.decision
    if decision is not None:
        reading = _reading(decision.latency_ns, decision.target_ns)
        reading += "" if decision.other is None else f" at {quantile(decision.quantile)}"
        slack, queued = percent_range(decision.slack_ratio), milliseconds_range(decision.max_queued_ns)
        ruler = shown(decision.ruler_name)
    else:
        latency, target = status.latency_seconds, status.target_seconds
        reading = "–" if target is None else _reading(None if latency is None else latency * 1e9, target * 1e9)
        slack = "–" if status.slack_ratio is None else percent_range(status.slack_ratio)
        queued = ruler = "–"
    share = "–" if status.share_ratio is None else percent_range(status.share_ratio)
    rule = "–" if status.rule is None else shown(status.rule)
    return (shown(one.name), status.role, rule, ruler, reading, slack.replace("unknown", "–"), share, queued)


def notes(one: Planned) -> list[str]:
    """Why this share, which rungs would act, and the obstacles of the others."""
    lines = [f"why: {shown(one.status.reason)}"] if one.status.reason else []
    able = [rung for rung, obstacle in one.rungs.items() if obstacle is None]
    if able:
        lines.append(f"ladder: {', '.join(able)}")
    return lines + [f"{rung} cannot: {shown(why)}" for rung, why in one.rungs.items() if why is not None]


def show(planned: Sequence[Planned], enforced: bool, out: IO[str]) -> None:
    """Prints it, as wide as the terminal; 80 columns without one."""
    from agent.tui.terminal import Printer  # rich is slow to import

    screen = Printer(out)
    if not planned:
        screen.line("no container uses a GPU now: there is nothing to decide")
        return
    screen.table(COLUMNS, [cells(one) for one in planned])
    for one in planned:
        if lines := notes(one):
            screen.line()
            screen.line(shown(one.name), style="bold")
            for note in lines:
                screen.line(f"  {note}")
    screen.line()
    screen.line(
        "nothing was done: this is what the agent would decide with this policy"
        if enforced
        else "the policy has `enforce: false`: the agent decides this too, and does nothing about it"
    )


def _reading(latency_ns: float | None, target_ns: float) -> str:
    return f"{'–' if latency_ns is None else milliseconds_range(latency_ns)} / {milliseconds_range(target_ns)}"
