# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check POLICY`: whether the agent would take a policy, and what it would think of it.

A warning is something that the policy may well mean but that rarely is meant; it never changes the exit code.
"""

from __future__ import annotations

import os
from typing import TextIO

from agent.errors import PolicyError
from enforce.policy import vocabulary
from enforce.policy.load import load, permission_problem
from enforce.policy.model import OfflineRule, Policy


def check(path: str | os.PathLike[str], out: TextIO) -> int:
    """Print one line if the policy is right, else one for each mistake, then the warnings. Exit code 0 or 2."""
    name = os.fspath(path)
    try:
        policy = load(name)
    except PolicyError as error:
        print("\n".join(error.problems), file=out)
        return error.exit_code
    print(f"{name}: ok: {summary(policy)}", file=out)
    problem = permission_problem(name)
    found = [f"{problem}: the agent will refuse this file"] if problem else []
    for warning in (*found, *warnings(policy)):
        print(f"{name}: warning: {warning}", file=out)
    return 0


def summary(policy: Policy) -> str:
    """1 online rule, 2 offline rules, enforcing."""
    counts = (f"{len(rules)} {kind} rule{'' if len(rules) == 1 else 's'}" for kind, rules in _rules(policy))
    return ", ".join((*counts, "enforcing" if policy.enforce else "deciding and logging only (enforce: false)"))


def _rules(policy: Policy) -> tuple[tuple[str, tuple[object, ...]], ...]:
    return (("online", policy.online), ("offline", policy.offline))


def warnings(policy: Policy) -> list[str]:
    """What is allowed but rarely meant; also logged by the agent when it takes a policy."""
    found = []
    if policy.enforce and not policy.online:
        found.append("enforce is true but there is no online rule: offline work would be slowed for nobody's sake")
    if policy.enforce and not policy.offline:
        found.append("enforce is true but there is no offline rule: there is nothing to slow")
    for rule in policy.online:
        if rule.slo.target_ns >= rule.slo.window_ns:
            found.append(
                f"{rule.name}: slo.window is no longer than slo.target, so few requests end in it; make it 10s"
            )
        if rule.slo.min_samples * (1 - rule.slo.quantile) < 0.1:
            samples, quantile = rule.slo.min_samples, rule.slo.quantile
            found.append(
                f"{rule.name}: of {samples} requests (slo.min_samples) the quantile {quantile:g} is the slowest"
            )
        if rule.match in policy.protect:
            found.append(f"{rule.name}: protect has the same match, so the rule never applies; remove one of them")
    for offline in policy.offline:
        found += _offline(policy, offline)
    return found


def _offline(policy: Policy, rule: OfflineRule) -> list[str]:
    found = []
    if rule.limits.memory_bytes is not None and not any(rung in vocabulary.MEMORY_RUNGS for rung in rule.ladder):
        rungs = ", ".join(vocabulary.MEMORY_RUNGS)
        found.append(f"{rule.name}: limits.memory has no effect: the ladder has none of {rungs}; add deny and hold")
    if rule.match in policy.protect:
        found.append(f"{rule.name}: protect has the same match, so the rule never applies; remove one of them")
    return found
