# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check POLICY`: whether the agent would take a policy, and what it would think of it.

A warning is something that the policy may well mean but that rarely is meant; it never changes the exit code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from agent.errors import PolicyError
from agent.model import Snapshot
from agent.names import printable
from agent.yaml_source import Place
from enforce.policy.advice import Advice, advice
from enforce.policy.excerpt import excerpt
from enforce.policy.load import Judged, examine
from enforce.policy.model import Policy
from enforce.policy.running import disputed, everybody, idle_rules, misannotated


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake or a warning. Without a place it is about the file as such."""

    severity: str  # "error" | "warning"
    place: Place | None
    text: str


def check(path: str | os.PathLike[str], as_json: bool, live: Snapshot | None, out: TextIO) -> int:
    """Print one line if the policy is right, else every mistake; then the warnings. Exit code 0 or 2.

    `live`: also compare with what runs now.
    """
    judged = examine(path)
    found = findings(judged, live)
    if as_json:
        json.dump(document(judged, found), out, indent=2)
        out.write("\n")
    else:
        show(judged, found, out)
    return 0 if judged.policy is not None else PolicyError.exit_code


def findings(judged: Judged, live: Snapshot | None) -> list[Finding]:
    """Mistakes in file order; warnings only about a policy that has none."""
    policy = judged.policy
    if policy is None:
        return [Finding("error", problem.place, problem.text) for problem in judged.problems]
    exposed = judged.exposed
    refused = [Finding("warning", None, f"{exposed}: the agent will refuse this file")] if exposed else []
    said = [*advice(policy), *(_against(policy, live) if live else ())]
    return refused + [Finding("warning", judged.read.place(one.path), one.text) for one in said]


def _against(policy: Policy, live: Snapshot) -> Iterator[Advice]:
    from enforce.pages import unresolved  # prometheus-client is slow to import

    running = everybody(live)
    yield from idle_rules(policy, running)
    yield from disputed(policy, running)
    yield from misannotated(policy, running)
    yield from unresolved(policy)


def document(judged: Judged, found: list[Finding]) -> dict[str, object]:
    """What --json prints: lines and columns count from 1, in characters; `width` is how many it is about."""
    return {
        "file": judged.name,
        "ok": judged.policy is not None,
        "summary": summary(judged.policy) if judged.policy is not None else None,
        "findings": [_one(judged, finding) for finding in found],
    }


def _one(judged: Judged, finding: Finding) -> dict[str, object]:
    where: dict[str, object] = {"line": None, "column": None, "width": None, "excerpt": None}
    if (place := finding.place) is not None:
        where = {"line": place.line, "column": place.column, "width": place.width}
        where["excerpt"] = excerpt(judged.text, place)[0]
    return {"severity": finding.severity, **where, "text": finding.text}


def show(judged: Judged, found: list[Finding], out: TextIO) -> None:
    """For people: file:line:column, what is wrong and what to write, the line itself; in colour on a terminal."""
    from enforce.explain.screen import Screen  # rich is slow to import

    screen = Screen(out)
    for line in _lines(judged, found):
        screen.parts(*line)


def plain(judged: Judged, found: list[Finding]) -> str:
    """The same as one text, without colours."""
    return "\n".join("".join(text for text, _style in line) for line in _lines(judged, found))


def _lines(judged: Judged, found: list[Finding]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Texts and their styles."""
    name = printable(judged.name)
    if judged.policy is not None:
        yield (f"{name}: ", "bold"), ("ok", "bold green"), (f": {summary(judged.policy)}", "")
    for finding in found:
        colour = "red" if finding.severity == "error" else "yellow"
        place = finding.place
        where = f"{name}:{place.line}:{place.column}: " if place is not None else f"{name}: "
        yield (where, "bold"), (f"{finding.severity}: ", f"bold {colour}"), (printable(finding.text), "")
        if place is not None and judged.text:
            line, carets = excerpt(judged.text, place)
            yield (f"{place.line:>5} | ", "dim"), (line, "")
            yield ("      | ", "dim"), (carets, f"bold {colour}")


def summary(policy: Policy) -> str:
    """1 online rule, 2 offline rules, enforcing."""
    counts = (f"{len(rules)} {kind} rule{'' if len(rules) == 1 else 's'}" for kind, rules in _rules(policy))
    return ", ".join((*counts, "enforcing" if policy.enforce else "deciding and logging only (enforce: false)"))


def _rules(policy: Policy) -> tuple[tuple[str, tuple[object, ...]], ...]:
    return (("online", policy.online), ("offline", policy.offline))
