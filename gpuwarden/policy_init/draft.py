# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A first policy as text, with comments that say how to go on. Pure; the result is judged before it is written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from agent.names import joined, printable
from enforce.init.proposal import Proposal, Use, Written
from enforce.policy.units import format_ratio

_WIDTH = 120
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9._/-]*")
_QUANTITY = re.compile(r"[0-9][A-Za-z0-9.]*%?")
_WORDS = {"true", "false", "null"}
_ODD = re.compile(r"[^A-Za-z0-9._-]+")

_COUNTS = (("vllm", "vLLM"), ("triton", "Triton"))  # servers whose histograms are better than gpu_wait

_HEAD = """\
# yaml-language-server: $schema=policy.schema.json
# Editors complete and check the keys after: gpuwarden policy schema >policy.schema.json (beside this file)
#
# A first policy, written by `gpuwarden policy init`. It slows nothing yet: what the agent would do is decided and
# logged only. How to go on:
#   1. Correct what is wrong below: classes, matches, targets.   gpuwarden check --live {file}
#   2. See what it would do now.                                 gpuwarden plan --policy {file}
#   3. Let the agent run with it for a while, and ask why.       gpuwarden explain CONTAINER
#   4. Write enforce: true: the agent takes the file at once.    gputop shows who is slowed, and for whom
# All keys: docs/policy.md. More examples: docs/examples/.
version: 1
enforce: false
"""
_ONLINE = "\n# Containers with a latency promise. They are never slowed.\n"
_NO_ONLINE = """\
# online:
#   - name: chat
#     match: {namespace: serving, pod: "chat-*"}
#     slo: {signal: gpu_wait, quantile: 0.99, target: 50ms, window: 10s}
"""
_OFFLINE = "\n# Containers that may be slowed to keep those promises.\n"
_NO_OFFLINE = """\
# offline:
#   - name: training
#     match: {namespace: batch}
"""
_ALONE = "\n# Left alone, as is all that no rule names:\n"


@dataclass(frozen=True, slots=True)
class Draft:
    """One rule that is to be written; `slo` only of an online one, in the order that it is written in."""

    name: str
    match: Written
    about: tuple[str, ...] = ()  # comments
    slo: Mapping[str, str] = field(default_factory=dict)


def text(online: Sequence[Draft], offline: Sequence[Draft], file: str) -> str:
    """The whole file, but for what `left` says."""
    parts = [_HEAD.replace("{file}", "FILE" if file == "-" else printable(file)), _ONLINE]
    names: set[str] = set()
    parts.append("".join(["online:\n", *(_rule(one, names) for one in online)]) if online else _NO_ONLINE)
    parts.append(_OFFLINE)
    parts.append("".join(["offline:\n", *(_rule(one, names) for one in offline)]) if offline else _NO_OFFLINE)
    return "".join(parts)


def left(alone: Iterable[str]) -> str:
    """Comments on who is left alone, for the end of the file."""
    lines = "".join(_comment(line, "#   ") for line in alone)
    return _ALONE + lines if lines else ""


def about(proposal: Proposal) -> tuple[str, ...]:
    """Who that is now, and why it was proposed so."""
    uses, image = proposal.uses, proposal.uses[0].facts.container.image or ""
    better = [f"{name} counts its own latencies: docs/examples/{word}.yaml" for word, name in _COUNTS if word in image]
    more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
    return (f"now: {title(uses[0])}{more}, {used(uses)} ({proposal.why})", *better)


def title(use: Use) -> str:
    """namespace/pod: name, as much of it as there is."""
    it = use.facts.container
    pod = joined(it.namespace, it.pod)
    return printable(f"{pod}: {it.name}" if pod else it.name, 160)


def used(uses: Sequence[Use]) -> str:
    """31% of SM time, 12.3 GiB."""
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
    """As near to it as a rule's name can be; unique."""
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
    """Text that YAML reads as this text."""
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return str(yaml.safe_dump(value, default_style='"', width=1 << 20, allow_unicode=True)).strip()


def _comment(line: str, lead: str) -> str:
    folded = textwrap.wrap(line, _WIDTH - len(lead), subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"{lead}{part}\n" for part in folded)
