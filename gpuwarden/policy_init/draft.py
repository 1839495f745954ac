# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A first policy as text, with comments on the next steps, and the roles that it gives to the running containers. Pure.

The roles come from the checked policy, not from the proposals: a pattern may match more than it was made for.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from agent.core.text import joined, printable
from enforce.policy.annotations import classified
from enforce.policy.findings import Advice, rules_of
from enforce.policy.model import Classification, Policy
from enforce.policy.quantities import format_ratio
from gpuwarden.policy_init.proposal import MatchKeys, Proposal, Use

_WIDTH = 120
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*")
_QUANTITY = re.compile(r"[0-9][A-Za-z0-9.]*%?")
_WORDS = {"true", "false", "null"}
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_LATENCY_METRICS = (("vllm", "vLLM"), ("triton", "Triton"))  # servers whose histograms are better than gpu_wait

_HEAD = """\
# yaml-language-server: $schema=policy.schema.json
# Editors complete and check the keys after: gpuwarden policy schema >policy.schema.json (beside this file)
#
# A first policy, written by `gpuwarden policy init`. It slows nothing yet: the agent only decides and logs.
# Next steps:
#   1. Correct what is wrong below: classes, matches, targets.   gpuwarden check --live {file}
#   2. See what it would do now.                                 gpuwarden plan --policy {file}
#   3. Run the agent with it for a while, and see why.           gpuwarden explain CONTAINER
#   4. Write enforce: true: the agent reloads the file itself.    gputop shows what is slowed, and for what
# All keys: docs/policy.md. More examples: docs/examples/.
version: 1
enforce: false
"""

_ONLINE = "\n# Containers with a latency SLO. They are never slowed.\n"

_NO_ONLINE = """\
# online:
#   - name: chat
#     match: {namespace: serving, pod: "chat-*"}
#     slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
"""

_OFFLINE = "\n# Containers that may be slowed to meet those SLOs.\n"

_NO_OFFLINE = """\
# offline:
#   - name: training
#     match: {namespace: batch}
"""

_ALONE = "\n# Left alone, as is every container that no rule matches:\n"


@dataclass(frozen=True, slots=True)
class Draft:
    """One rule to be written; `slo` only of an online one, in the order of its keys in the file."""

    name: str
    match: MatchKeys
    about: tuple[str, ...] = ()  # comments
    slo: Mapping[str, str] = field(default_factory=dict)


def text(online: Sequence[Draft], offline: Sequence[Draft], file: str) -> str:
    """The whole file, without the comments of `left_alone`."""
    parts = [_HEAD.replace("{file}", "FILE" if file == "-" else printable(file)), _ONLINE]
    names: set[str] = set()
    parts.append("".join(["online:\n", *(_rule(one, names) for one in online)]) if online else _NO_ONLINE)
    parts.append(_OFFLINE)
    parts.append("".join(["offline:\n", *(_rule(one, names) for one in offline)]) if offline else _NO_OFFLINE)
    return "".join(parts)


def left_alone(alone: Iterable[str]) -> str:
    """Comments on the containers that are left alone, for the end of the file."""
    lines = "".join(_comment(line, "#   ") for line in alone)
    return _ALONE + lines if lines else ""


def about(proposal: Proposal) -> tuple[str, ...]:
    """Comments on a rule: the containers that it is about now, and why it was proposed."""
    uses, image = proposal.uses, proposal.uses[0].facts.container.image or ""
    better = [
        f"{name} exports its own latencies: docs/examples/{word}.yaml"
        for word, name in _LATENCY_METRICS
        if word in image
    ]
    more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
    return (f"now: {title(uses[0])}{more}, {used(uses)} ({proposal.why})", *better)


def title(use: Use) -> str:
    """namespace/pod: name, as far as known."""
    it = use.facts.container
    pod = joined(it.namespace, it.pod)
    return printable(f"{pod}: {it.name}" if pod else it.name, 160)


def used(uses: Sequence[Use]) -> str:
    """GPU use: 31% of SM time, 12.3 GiB."""
    ratios = [use.sm_ratio for use in uses if use.sm_ratio is not None]
    sizes = [use.memory_bytes for use in uses if use.memory_bytes is not None]
    time = f"{format_ratio(round(sum(ratios), 2))} of a GPU's SM time" if ratios else "SM time unknown"
    return f"{time}, {sum(sizes) / 2**30:.1f} GiB" if sizes else time


def _rule(rule: Draft, names: set[str]) -> str:
    lines = [_comment(line, "  # ") for line in rule.about]
    lines += [f"  - name: {_name(rule.name, names)}\n", f"    match: {_flow(rule.match)}\n"]
    if rule.slo:
        slo = (f"{key}: {value if _QUANTITY.fullmatch(value) else scalar(value)}" for key, value in rule.slo.items())
        lines.append(f"    slo: {{{', '.join(slo)}}}\n")
    return "".join(lines)


def _name(wanted: str, taken: set[str]) -> str:
    """A valid and unique rule name, as near to `wanted` as possible."""
    plain = _ODD.sub("-", wanted)[:55].strip("._-") or "rule"
    name = next(name for number in range(1, len(taken) + 2) if (name := _numbered(plain, number)) not in taken)
    taken.add(name)
    return scalar(name)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(key))}: {_flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return scalar(str(value))


def scalar(value: str) -> str:
    """A YAML scalar that is read as this text."""
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return str(yaml.safe_dump(value, default_style='"', width=1 << 20, allow_unicode=True)).strip()


def _comment(line: str, lead: str) -> str:
    folded = textwrap.wrap(line, _WIDTH - len(lead), subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"{lead}{part}\n" for part in folded)


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """The containers of a proposal that the policy classifies alike."""

    proposal: Proposal
    found: Classification


def outcomes(policy: Policy, now: Iterable[Proposal]) -> list[DraftOutcome]:
    """How the policy classifies the containers of each proposal; one or more outcomes a proposal."""
    made = []
    for one in now:
        alike: dict[Classification, list[Use]] = {}
        for use in one.uses:
            alike.setdefault(classified(policy, use.facts), []).append(use)
        made += [DraftOutcome(replace(one, uses=tuple(uses)), found) for found, uses in alike.items()]
    return made


def unruled(made: Iterable[DraftOutcome]) -> list[str]:
    """A line for each container that is left alone, and why: no rule, or two that dispute it."""
    return [_line(one.proposal, one.found) for one in made if one.found.rule is None]


def _line(one: Proposal, found: Classification) -> str:
    more = f" and {len(one.uses) - 1} more" if len(one.uses) > 1 else ""
    return f"{title(one.uses[0])}{more}, {used(one.uses)} ({found.reason if found.misconfigured else one.why})"


def unintended(policy: Policy, made: Iterable[DraftOutcome]) -> Iterator[Advice]:
    """Warnings about containers that were to be left alone, by the proposals, and are matched by a rule."""
    path_of = {rule.name: path for path, rule in rules_of(policy)}
    for one in made:
        rule = one.found.rule
        if one.proposal.role is None and rule is not None:
            text = f"{title(one.proposal.uses[0])} was to be left alone, but {rule.name} makes it {one.found.role}"
            yield Advice((*path_of[rule.name], "match"), f"{text}; make the match narrower")
