# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy held against what runs now: rules that nothing fits, containers that two rules claim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.model import Snapshot
from agent.names import printable
from enforce.policy.advice import Advice, rules_of
from enforce.policy.annotations import classified
from enforce.policy.model import Facts, Policy, ProcessFacts, Role


def everybody(snapshot: Snapshot) -> list[Facts]:
    """Each container that uses a GPU, as the rules see it; whoever only holds one has no processes."""
    users = {row.process.id: ProcessFacts(row.process.user, row.process.command) for row in snapshot.processes}
    return [
        Facts(row.container, tuple(users[process] for process in row.processes if process in users))
        for row in (*snapshot.containers, *snapshot.held)
    ]


def idle_rules(policy: Policy, running: Sequence[Facts]) -> Iterator[Advice]:
    """Rules that nothing of it fits. What is protected need not use a GPU."""
    seen = f"fits none of the {len(running)} containers that use a GPU now" if running else "nothing uses a GPU now"
    for path, rule in rules_of(policy):
        if not any(rule.match.fits(facts, every_process=path[0] == "offline") for facts in running):
            yield Advice((*path, "match"), f"{rule.name}: {seen}; compare with gputop --once --json")


def misannotated(policy: Policy, running: Sequence[Facts]) -> Iterator[Advice]:
    """Pods whose annotations are not taken."""
    for facts in running:
        found = classified(policy, facts)
        if found.amiss and not found.conflict:
            yield Advice(("annotations",), f"{printable(facts.container.pod or '', 160)}: {found.reason}")


def disputed(policy: Policy, running: Sequence[Facts]) -> Iterator[Advice]:
    """Containers that are claimed by more than one rule."""
    index = {rule.name: path for path, rule in rules_of(policy)}
    for facts in running:
        found = policy.classify(facts)
        if found.conflict:
            outcome = "left alone" if found.role is Role.UNMATCHED else f"given to {found.conflict[0]}"
            text = f"{printable(facts.container.name, 160)} is claimed by {' and '.join(found.conflict)}, and {outcome}"
            yield Advice((*index[found.conflict[-1]], "match"), f"{text}; make one of them narrower")
