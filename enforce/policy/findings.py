# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What `gpuwarden check` and a reload report about a policy: its mistakes, its warnings, with their lines.

A warning is something that a policy may contain but rarely means; it never changes the exit code. `advice` needs the
policy alone, and the agent logs it; `idle_rules`, `disputed` and `ignored_annotations` compare it with the containers
that run now. Pure. Names from outside are shown as escapes where they could steer a terminal, and are as wide there as
the carets below them take them to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from agent.config.validation import Checked
from agent.config.yaml_source import KeyPath, YamlPosition
from agent.core.model import Snapshot
from agent.core.text import printable
from agent.probes.abi import middle_ns
from enforce.policy import model
from enforce.policy.annotations import classified
from enforce.policy.matching import about_processes, covers
from enforce.policy.model import (
    ContainerFacts,
    OfflineRule,
    OnlineRule,
    PeriodicRule,
    Policy,
    ProcessFacts,
    Role,
    Rule,
    Slo,
)
from enforce.policy.quantities import copy_bound, format_duration

_SCRAPE_NS = 1_000_000_000  # between two scrapes of a page of metrics


@dataclass(frozen=True, slots=True)
class Advice:
    """`what is odd; what to write instead`, and the key that it is about."""

    path: KeyPath
    text: str


def advice(policy: Policy) -> list[Advice]:
    """Warnings that need the policy alone."""
    return [
        *_one_sided(policy),
        *(one for index, rule in enumerate(policy.online) for one in _promise(("online", index), rule)),
        *(one for index, rule in enumerate(policy.offline) for one in _bounds(("offline", index), rule)),
        *(one for index, rule in enumerate(policy.periodic) for one in _turns(("periodic", index), rule)),
        *_protected(policy),
        *_never_first(policy),
        *_overlaps(policy),
    ]


def _one_sided(policy: Policy) -> Iterator[Advice]:
    if "*" in policy.annotations.online:
        text = "the pods of every namespace may declare an SLO, and so have any offline container slowed"
        yield Advice(("annotations", "online"), f"{text}; name the namespaces")
    online, offline = (policy.online or policy.annotations.online), (policy.offline or policy.annotations.offline)
    periodic = policy.periodic or policy.annotations.periodic
    if policy.enforce and not online and not periodic:
        text = "enforce is true but there is no online rule: offline work would be slowed to no end"
        yield Advice(("enforce",), f"{text}; add one, or write enforce: false")
    if online and not offline:
        text = "there is no offline rule: nothing may be slowed to meet the SLO"
        yield Advice(("online",), f"{text}; write which containers may be slowed, below offline:")
    elif policy.enforce and not offline and not periodic:
        text = "enforce is true but there is no offline rule: there is nothing to slow"
        yield Advice(("enforce",), f"{text}; add one, or write enforce: false")


def _promise(path: KeyPath, rule: OnlineRule) -> Iterator[Advice]:
    slo, at = rule.slo, (*path, "slo")
    if slo.target_ns >= slo.window_ns:
        text = f"{rule.name}: slo.window is no longer than slo.target, so few requests end in it; make it 10s"
        yield Advice((*at, "window"), text)
    if slo.min_samples * (1 - slo.quantile) < 0.1:
        text = f"{rule.name}: of {slo.min_samples} requests (slo.min_samples) the quantile {slo.quantile:g} is the"
        enough = round(1 / (1 - slo.quantile))
        more = f"min_samples: {enough}, or " if enough <= model.MOST_SAMPLES else ""
        yield Advice((*at, "quantile"), f"{text} slowest; write {more}a lower quantile")
    if slo.signal == "prometheus":
        if slo.window_ns < 2 * _SCRAPE_NS:
            text = f"{rule.name}: the page of metrics is scraped once a second, so such a window often has no sample"
            yield Advice((*at, "window"), f"{text}; make it 10s")
    else:
        below, lowest = objectives(slo)[-1]
        if lowest.target_ns <= middle_ns(0):
            text = f"{rule.name}: signal {slo.signal} cannot resolve {format_duration(lowest.target_ns)}"
            yield Advice((*at, *below, "target"), f"{text}; write 10us or more")


def objectives(slo: Slo) -> tuple[tuple[KeyPath, Slo], ...]:
    """The SLO by each of its quantiles, the highest first, with the place of its keys below `slo`."""
    return (((), slo),) if slo.also is None else (((), slo), (("also",), slo.also))


def _bounds(path: KeyPath, rule: OfflineRule) -> Iterator[Advice]:
    if rule.limits.memory_bytes is not None and not any(rung in model.MEMORY_RUNGS for rung in rule.ladder):
        rungs = ", ".join(model.MEMORY_RUNGS)
        text = f"{rule.name}: limits.memory has no effect: the ladder has none of {rungs}; add deny and hold"
        yield Advice((*path, "ladder"), text)


def _turns(path: KeyPath, rule: PeriodicRule) -> Iterator[Advice]:
    if rule.max_pause_ns < rule.deadline_ns:
        text = f"{rule.name}: after max_pause, {format_duration(rule.max_pause_ns)}, a request waits for no turn,"
        yield Advice(path, f"{text} though it could be in time; write max_pause: {format_duration(rule.deadline_ns)}")


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


def _overlaps(policy: Policy) -> Iterator[Advice]:
    """An offline rule and another that surely overlap: a container that both match is left alone."""
    for index, rule in enumerate(policy.offline):
        for path, other in rules_of(policy):
            if other is rule or (path[0] == "offline" and other.match == rule.match):
                continue
            if _covers_all(rule, other):
                text = f"{other.name}: {rule.name} matches all that this rule matches, so these are left alone"
                yield Advice((*path, "match"), f"{text}; make {rule.name} narrower")
            elif not isinstance(other, OfflineRule) and _covers_all(other, rule):
                text = f"{rule.name}: {other.name} matches all that this rule matches, so these are left alone"
                yield Advice(("offline", index, "match"), f"{text}; make {other.name} narrower")


def _covers_all(wide: Rule, narrow: Rule) -> bool:
    if isinstance(wide, OfflineRule) and not isinstance(narrow, OfflineRule) and about_processes(wide.match):
        return False  # an offline rule needs all processes to match, an online rule one
    return covers(wide.match, narrow.match)


def rules_of(policy: Policy) -> Iterator[tuple[KeyPath, Rule]]:
    """All rules, each with its place in the file."""
    for index, online in enumerate(policy.online):
        yield ("online", index), online
    for index, offline in enumerate(policy.offline):
        yield ("offline", index), offline
    for index, periodic in enumerate(policy.periodic):
        yield ("periodic", index), periodic


_WIDEST = 100
_BEFORE = 60  # characters kept before the position in a line that is wider than _WIDEST


def excerpt(text: str, place: YamlPosition) -> tuple[str, str]:
    """The line at a position and the carets below it; of a long line the part around the position."""
    lines = text.split("\n")
    line = lines[place.line - 1].rstrip("\r") if place.line <= len(lines) else ""
    at, end = place.column - 1, place.column - 1 + max(1, place.width)
    start = max(0, at - _BEFORE) if len(line) > _WIDEST else 0
    head = ("…" if start else "") + printable(line[start:at])
    marked, tail = printable(line[at:end], _WIDEST), printable(line[end : start + _WIDEST])
    more = "…" if end < start + _WIDEST < len(line) else ""
    return head + marked + tail + more, " " * cell_len(head) + "^" * max(1, cell_len(marked))


def container_facts(snapshot: Snapshot) -> list[ContainerFacts]:
    """Each container with a GPU, as the rules see it; one that holds a GPU without using it has no processes."""
    users = {row.process.id: ProcessFacts(row.process.user, row.process.command) for row in snapshot.processes}
    return [
        ContainerFacts(row.container, tuple(users[process] for process in row.processes if process in users))
        for row in (*snapshot.containers, *snapshot.held)
    ]


def idle_rules(policy: Policy, running: Sequence[ContainerFacts]) -> Iterator[Advice]:
    """Rules that no container matches. What is under `protect` need not use a GPU."""
    seen = f"matches none of the {len(running)} containers with a GPU now" if running else "no container has a GPU now"
    for path, rule in rules_of(policy):
        if not any(rule.match.fits(facts, every_process=path[0] == "offline") for facts in running):
            yield Advice((*path, "match"), f"{rule.name}: {seen}; compare with gputop --once --json")


def ignored_annotations(policy: Policy, running: Sequence[ContainerFacts]) -> Iterator[Advice]:
    """Pods whose annotations are ignored."""
    for facts in running:
        found = classified(policy, facts)
        if found.misconfigured and not found.conflict:
            yield Advice(("annotations",), f"{printable(facts.container.pod or '', 160)}: {found.reason}")


def disputed(policy: Policy, running: Sequence[ContainerFacts]) -> Iterator[Advice]:
    """Containers that more than one rule matches."""
    index = {rule.name: path for path, rule in rules_of(policy)}
    for facts in running:
        found = policy.classify(facts)
        if found.conflict:
            outcome = "left alone" if found.role is Role.UNMATCHED else f"given to {found.conflict[0]}"
            text = f"{printable(facts.container.name, 160)} is matched by {' and '.join(found.conflict)}, and {outcome}"
            yield Advice((*index[found.conflict[-1]], "match"), f"{text}; make one of them narrower")


def overloaded(policy: Policy, live: Snapshot) -> Iterator[Advice]:
    """Periodic rules of which a container is on a GPU with more requests than deadlines can be promised for."""
    loads: dict[str | None, float] = {}
    for status in live.enforcement.values():
        if status.periodic is not None and status.periodic.load_ratio is not None:
            loads[status.rule] = max(status.periodic.load_ratio, loads.get(status.rule, 0.0))
    for index, rule in enumerate(policy.periodic):
        if (load := loads.get(rule.name, 0.0)) > 1:
            text = f"{rule.name}: deadlines may be missed, as the load of a GPU with such a container is {load:.2f} now"
            yield Advice(("periodic", index), f"{text}; up to 1 all are met: move one, or give it a longer deadline")


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake or a warning. Without a position it is about the file as a whole."""

    severity: str  # "error" | "warning"
    place: YamlPosition | None
    text: str


def findings(checked: Checked[Policy]) -> list[Finding]:
    """Mistakes in file order; warnings only about a policy that has none."""
    policy = checked.value
    if policy is None:
        return [Finding("error", problem.place, problem.text) for problem in checked.problems]
    exposed = checked.exposed
    refused = [Finding("warning", None, f"{exposed}: the agent will refuse this file")] if exposed else []
    return refused + warnings(checked, advice(policy))


def warnings(checked: Checked[Policy], advices: Iterable[Advice]) -> list[Finding]:
    """Advice as findings, each at the position of its key."""
    return [Finding("warning", checked.source.place(one.path), one.text) for one in advices]


def plain(checked: Checked[Policy], found: list[Finding]) -> str:
    """The report as one text, without colours."""
    return "\n".join("".join(text for text, _style in line) for line in lines(checked, found))


def lines(checked: Checked[Policy], found: list[Finding]) -> Iterator[tuple[tuple[str, str], ...]]:
    """The lines of the report: texts and their styles."""
    name = printable(checked.name)
    if checked.value is not None:
        yield (f"{name}: ", "bold"), ("ok", "bold green"), (f": {summary(checked.value)}", "")
    for finding in found:
        colour = "red" if finding.severity == "error" else "yellow"
        place = finding.place
        where = f"{name}:{place.line}:{place.column}: " if place is not None else f"{name}: "
        yield (where, "bold"), (f"{finding.severity}: ", f"bold {colour}"), (printable(finding.text), "")
        if place is not None and checked.text:
            line, carets = excerpt(checked.text, place)
            yield (f"{place.line:>5} | ", "dim"), (line, "")
            yield ("      | ", "dim"), (carets, f"bold {colour}")


def summary(policy: Policy) -> str:
    """The policy in a line: 1 online rule, 2 offline rules, enforcing."""
    kinds = [(kind, rules) for kind, rules in _rules(policy) if rules or kind != "periodic"]
    counts = (f"{len(rules)} {kind} rule{'' if len(rules) == 1 else 's'}" for kind, rules in kinds)
    acting = "enforcing" if policy.enforce else "deciding and logging only (enforce: false)"
    pcie = (f"copies paced: {copy_bound(policy.pcie.bytes_per_second)}",) if policy.pcie.pace else ()
    return ", ".join((*counts, acting, *pcie))


def _rules(policy: Policy) -> tuple[tuple[str, tuple[object, ...]], ...]:
    return (("online", policy.online), ("offline", policy.offline), ("periodic", policy.periodic))
