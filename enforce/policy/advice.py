# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a policy may say but rarely means. Pure; the agent logs it too when it takes a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from agent.yaml_source import Path
from enforce.histogram import middle_ns
from enforce.policy import vocabulary
from enforce.policy.model import OfflineRule, OnlineRule, Policy
from enforce.policy.overlap import about_processes, covers
from enforce.policy.quantities import Whole
from enforce.policy.units import format_duration

_PAGE_NS = 1_000_000_000  # between two looks at a page of metrics


@dataclass(frozen=True, slots=True)
class Advice:
    """`what is odd; what to write instead`, and the key that it is about."""

    path: Path
    text: str


def advice(policy: Policy) -> list[Advice]:
    """What can be told from the policy alone."""
    return [
        *_one_sided(policy),
        *(one for index, rule in enumerate(policy.online) for one in _promise(("online", index), rule)),
        *(one for index, rule in enumerate(policy.offline) for one in _bounds(("offline", index), rule)),
        *_protected(policy),
        *_never_first(policy),
        *_claimed_twice(policy),
    ]


def _one_sided(policy: Policy) -> Iterator[Advice]:
    if "*" in policy.annotations.online:
        text = "the pods of every namespace may claim a promise, and have whatever is offline slowed for it"
        yield Advice(("annotations", "online"), f"{text}; name the namespaces")
    online, offline = (policy.online or policy.annotations.online), (policy.offline or policy.annotations.offline)
    if policy.enforce and not online:
        text = "enforce is true but there is no online rule: offline work would be slowed for nobody's sake"
        yield Advice(("enforce",), f"{text}; add one, or write enforce: false")
    if online and not offline:
        text = "there is no offline rule: nothing may be slowed to keep the promise"
        yield Advice(("online",), f"{text}; write which containers may be, below offline:")
    elif policy.enforce and not offline:
        text = "enforce is true but there is no offline rule: there is nothing to slow"
        yield Advice(("enforce",), f"{text}; add one, or write enforce: false")


def _promise(path: Path, rule: OnlineRule) -> Iterator[Advice]:
    slo, at = rule.slo, (*path, "slo")
    if slo.target_ns >= slo.window_ns:
        text = f"{rule.name}: slo.window is no longer than slo.target, so few requests end in it; make it 10s"
        yield Advice((*at, "window"), text)
    if slo.min_samples * (1 - slo.quantile) < 0.1:
        text = f"{rule.name}: of {slo.min_samples} requests (slo.min_samples) the quantile {slo.quantile:g} is the"
        enough = round(1 / (1 - slo.quantile))
        more = f"min_samples: {enough}, or " if enough <= Whole().most else ""
        yield Advice((*at, "quantile"), f"{text} slowest; write {more}a lower quantile")
    if slo.signal == "prometheus":
        if slo.window_ns < 2 * _PAGE_NS:
            text = f"{rule.name}: the page of metrics is looked at once a second, so such a window often holds nothing"
            yield Advice((*at, "window"), f"{text}; make it 10s")
    elif slo.target_ns <= middle_ns(0):
        text = f"{rule.name}: signal {slo.signal} cannot tell {format_duration(slo.target_ns)} from less"
        yield Advice((*at, "target"), f"{text}; write 10us or more")


def _bounds(path: Path, rule: OfflineRule) -> Iterator[Advice]:
    if rule.limits.memory_bytes is not None and not any(rung in vocabulary.MEMORY_RUNGS for rung in rule.ladder):
        rungs = ", ".join(vocabulary.MEMORY_RUNGS)
        text = f"{rule.name}: limits.memory has no effect: the ladder has none of {rungs}; add deny and hold"
        yield Advice((*path, "ladder"), text)


def _protected(policy: Policy) -> Iterator[Advice]:
    for path, rule in rules_of(policy):
        if any(covers(match, rule.match) for match in policy.protect):
            text = f"{rule.name}: protect matches all that this rule matches, so it never applies; remove one of them"
            yield Advice((*path, "match"), text)


def _never_first(policy: Policy) -> Iterator[Advice]:
    for index, rule in enumerate(policy.online):
        before = next((other for other in policy.online[:index] if covers(other.match, rule.match)), None)
        if before is not None:
            text = f"{rule.name}: {before.name}, which comes first, matches all that this rule matches"
            yield Advice(("online", index, "match"), f"{text}; move this one before it, or remove it")


def _claimed_twice(policy: Policy) -> Iterator[Advice]:
    """An offline rule and any other that must meet: whatever both claim is left alone."""
    for index, rule in enumerate(policy.offline):
        for path, other in rules_of(policy):
            if other is rule or (path[0] == "offline" and other.match == rule.match):
                continue
            if _always_both(rule, other):
                text = f"{other.name}: {rule.name} matches all that this rule matches too, so that is left alone"
                yield Advice((*path, "match"), f"{text}; make {rule.name} narrower")
            elif isinstance(other, OnlineRule) and _always_both(other, rule):
                text = f"{rule.name}: {other.name} matches all that this rule matches too, so that is left alone"
                yield Advice(("offline", index, "match"), f"{text}; make {other.name} narrower")


def _always_both(wide: OnlineRule | OfflineRule, narrow: OnlineRule | OfflineRule) -> bool:
    if isinstance(wide, OfflineRule) and isinstance(narrow, OnlineRule) and about_processes(wide.match):
        return False  # to be slowed all processes must fit, to be watched one
    return covers(wide.match, narrow.match)


def rules_of(policy: Policy) -> Iterator[tuple[Path, OnlineRule | OfflineRule]]:
    """All rules, each with its place in the file."""
    for index, online in enumerate(policy.online):
        yield ("online", index), online
    for index, offline in enumerate(policy.offline):
        yield ("offline", index), offline
