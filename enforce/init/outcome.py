# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the new policy makes of the containers that run now: a pattern may fit more than those it was made for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from enforce.init.draft import title, used
from enforce.init.proposal import Proposal, Use
from enforce.policy.advice import Advice, rules_of
from enforce.policy.annotations import classified
from enforce.policy.model import Classification, Policy


@dataclass(frozen=True, slots=True)
class Outcome:
    """Those of a proposal's containers of which the policy makes the same."""

    proposal: Proposal
    found: Classification


def outcomes(policy: Policy, now: Iterable[Proposal]) -> list[Outcome]:
    """Of each proposal one or more."""
    made = []
    for one in now:
        alike: dict[Classification, list[Use]] = {}
        for use in one.uses:
            alike.setdefault(classified(policy, use.facts), []).append(use)
        made += [Outcome(replace(one, uses=tuple(uses)), found) for found, uses in alike.items()]
    return made


def alone(made: Iterable[Outcome]) -> list[str]:
    """Who is left alone, and why; whoever two rules dispute is."""
    return [_line(one.proposal, one.found) for one in made if one.found.rule is None]


def _line(one: Proposal, found: Classification) -> str:
    more = f" and {len(one.uses) - 1} more" if len(one.uses) > 1 else ""
    return f"{title(one.uses[0])}{more}, {used(one.uses)} ({found.reason if found.amiss else one.why})"


def taken(policy: Policy, made: Iterable[Outcome]) -> Iterator[Advice]:
    """Who was to be left alone, by the proposals' roles, and is not."""
    path_of = {rule.name: path for path, rule in rules_of(policy)}
    for one in made:
        rule = one.found.rule
        if one.proposal.role is None and rule is not None:
            text = f"{title(one.proposal.uses[0])} was to be left alone, but {rule.name} makes it {one.found.role}"
            yield Advice((*path_of[rule.name], "match"), f"{text}; make the match narrower")
