# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check`: the mistakes in a policy or a web configuration, and warnings about a policy.

A warning is something that a policy may contain but rarely means; it never changes the exit code. Of a web
configuration no line is shown, as it holds secrets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from agent.config.validation import Checked
from agent.config.yaml_source import Problem
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import PolicyError, UsageError, WebConfigError
from agent.core.model import Snapshot
from agent.core.text import printable
from agent.exporters.api.client import HELP, place
from agent.exporters.web import config as web_config
from agent.exporters.web.auth import AccessRules
from agent.node.http_client import FetchError, fetch
from enforce.policy.findings import (
    Advice,
    Finding,
    container_facts,
    disputed,
    excerpt,
    findings,
    idle_rules,
    ignored_annotations,
    lines,
    objectives,
    overloaded,
    summary,
    warnings,
)
from enforce.policy.load import check_file
from enforce.policy.model import OnlineRule, Policy, PrometheusSource
from enforce.policy.quantities import format_duration
from gpuwarden.options import running

_FETCH_LIMIT_NS = 2 * NS_PER_SECOND
_NEAR_RATIO = 0.01  # a target this close to the end of a bucket is on it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden check`."""
    add = parser.add_argument
    add("policy", type=Path, nargs="?", metavar="POLICY", help="the policy file")
    add("--web-config", type=Path, metavar="FILE", help="validate a web configuration instead")
    add(
        "--live",
        action="store_true",
        help="also compare it with the running containers, and report rules that match none",
    )
    add("--json", action="store_true", help="print mistakes and warnings as JSON; see docs/policy.md")
    add("--socket", type=Path, help=HELP)


def act(options: argparse.Namespace) -> int:
    """Exit code 0 or 2. UsageError unless exactly one file is given."""
    if (options.policy is None) is (options.web_config is None):
        raise UsageError("exactly one file can be checked: write check POLICY, or check --web-config FILE")
    if options.web_config is not None:
        return check_web_config(options.web_config, options.json, sys.stdout)
    live = running(options.socket or place()) if options.live else None
    return check(options.policy, options.json, live, sys.stdout)


def check(path: str | os.PathLike[str], as_json: bool, live: Snapshot | None, out: TextIO) -> int:
    """Print one line if the policy is right, else every mistake; then the warnings. Exit code 0 or 2.

    `live`: also compare with what runs now.
    """
    checked = check_file(path)
    found = findings(checked) if live is None else with_live(checked, live)
    if as_json:
        json.dump(document(checked, found), out, indent=2)
        out.write("\n")
    else:
        show(checked, found, out)
    return 0 if checked.value is not None else PolicyError.exit_code


def with_live(checked: Checked[Policy], live: Snapshot) -> list[Finding]:
    """The findings of a policy, and warnings from comparing it with what runs now."""
    return [*findings(checked), *(warnings(checked, _against(checked.value, live)) if checked.value else ())]


def _against(policy: Policy, live: Snapshot) -> Iterator[Advice]:
    facts = container_facts(live)
    yield from idle_rules(policy, facts)
    yield from disputed(policy, facts)
    yield from ignored_annotations(policy, facts)
    yield from overloaded(policy, live)
    yield from unresolved(policy)


def document(checked: Checked[Policy], found: list[Finding]) -> dict[str, object]:
    """The output of --json: lines and columns count from 1, in characters; `width` is the length of the wrong part."""
    return {
        "file": checked.name,
        "ok": checked.value is not None,
        "summary": summary(checked.value) if checked.value is not None else None,
        "findings": [_one(checked, finding) for finding in found],
    }


def _one(checked: Checked[Policy], finding: Finding) -> dict[str, object]:
    where: dict[str, object] = {"line": None, "column": None, "width": None, "excerpt": None}
    if (place := finding.place) is not None:
        where = {"line": place.line, "column": place.column, "width": place.width}
        where["excerpt"] = excerpt(checked.text, place)[0]
    return {"severity": finding.severity, **where, "text": finding.text}


def show(checked: Checked[Policy], found: list[Finding], out: TextIO) -> None:
    """Prints file:line:column, what is wrong and what to write, then the line itself; in colour on a terminal."""
    from agent.tui.terminal import Printer  # rich is slow to import

    screen = Printer(out)
    for line in lines(checked, found):
        screen.parts(*line)


def _page(url: str) -> str:
    return fetch(url, monotonic_ns() + _FETCH_LIMIT_NS)


def unresolved(policy: Policy, page: Callable[[str], str] = _page) -> Iterator[Advice]:
    """Warnings about rules of signal prometheus: a page that cannot be read, or too coarse buckets.

    Reads each page once.
    """
    from enforce.signals.scraper import histograms  # prometheus-client is slow to import

    for index, rule in enumerate(policy.online):
        source = rule.slo.source
        if isinstance(source, PrometheusSource):
            try:
                series = histograms(page(source.url), source)
            except FetchError as error:
                yield Advice(("online", index, "slo", "url"), f"{rule.name}: {error}")
                continue
            ends = {round(le * source.unit_ns) for one in series.values() for le in one if math.isfinite(le)}
            for below, slo in objectives(rule.slo)[: None if ends else 1]:
                yield from _resolution(("online", index, "slo", *below), replace(rule, slo=slo), source, ends)


def _resolution(
    path: tuple[str | int, ...], rule: OnlineRule, source: PrometheusSource, ends: Iterable[int]
) -> Iterator[Advice]:
    target, known = rule.slo.target_ns, sorted(ends)
    if not known:
        text = f"{rule.name}: the page has no histogram {source.metric} with such labels; compare with the page"
        yield Advice((*path, "metric"), text)
        return
    if any(abs(end - target) <= _NEAR_RATIO * end for end in known):
        return
    problem = f"{rule.name}: the histogram cannot show whether {format_duration(target)} is met:"
    if target > known[-1]:
        text = f"{problem} its last finite bucket ends at {format_duration(known[-1])}; write that or less"
    else:
        below, above = next((a, b) for a, b in pairwise((0, *known)) if b > target)
        ends_at = f"{format_duration(below)} or {format_duration(above)}" if below else format_duration(above)
        text = f"{problem} its next buckets end at {ends_at}; write that"
    yield Advice((*path, "target"), text)


def check_web_config(path: Path, as_json: bool, out: TextIO) -> int:
    """Print one line if the web configuration is right, else every mistake. Exit code 0 or 2."""
    checked = web_config.check_file(path)
    if as_json:
        json.dump(_web_document(checked), out, indent=2)
        out.write("\n")
    else:
        out.writelines(f"{printable(line)}\n" for line in _web_lines(checked))
    return 0 if checked.value is not None else WebConfigError.exit_code


def _web_lines(checked: Checked[AccessRules]) -> list[str]:
    if checked.value is not None:
        return [f"{checked.name}: ok: {checked.value}"]
    return [f"{checked.name}:{one.place.line}:{one.place.column}: error: {one.text}" for one in checked.problems]


def _web_document(checked: Checked[AccessRules]) -> dict[str, object]:
    """As `check POLICY --json` has it, without excerpts."""
    return {
        "file": checked.name,
        "ok": checked.value is not None,
        "summary": None if checked.value is None else str(checked.value),
        "findings": list(map(_web_finding, checked.problems)),
    }


def _web_finding(problem: Problem) -> dict[str, object]:
    place = problem.place
    where = {"line": place.line, "column": place.column, "width": place.width, "excerpt": None}
    return {"severity": "error", **where, "text": problem.text}
