# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Mistakes that no single key shows: rules that collide, empty matches, a share without its law, a signal's keys.

Works on the values as read, not on validated ones, so that these are found in the same run as a bad unit elsewhere.
A value of the wrong type is skipped here: pydantic reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, cast

from agent.config.sections import example
from agent.config.yaml_source import KeyPath, Problem, Source
from enforce.policy import model, quantities
from enforce.policy.schema import FORMAT, LimitsSection, SloSection

label: Final = FORMAT.label
_Rule = tuple[KeyPath, dict[str, object]]
_RULES: Final = ("online", "offline", "periodic")


def crosschecks(source: Source) -> list[Problem]:
    """Every such mistake, each at the line of what has to be changed."""
    rules = [*_same_names(source), *_empty_matches(source), *_same_matches(source)]
    found = [*rules, *_laws(source), *_slos(source), *_deadlines(source)]
    return [Problem(source.key_place(path), text) for path, text in found]


def _entries(source: Source, *lists: str) -> Iterator[_Rule]:
    data = source.data if isinstance(source.data, dict) else {}
    for key in lists:
        rules = data.get(key)
        for index, rule in enumerate(rules if isinstance(rules, list) else []):
            if isinstance(rule, dict):
                yield (key, index), rule


def _same_names(source: Source) -> Iterator[tuple[KeyPath, str]]:
    first: dict[str, KeyPath] = {}
    for path, rule in _entries(source, *_RULES):
        name = rule.get("name")
        if isinstance(name, str) and first.setdefault(name, path) != path:
            there = f"{label(first[name])} on line {source.place((*first[name], 'name')).line}"
            yield (
                (*path, "name"),
                f"{label(path)}.name: {name[:60]!r} is already the name of {there}; choose another",
            )


def _matches(source: Source) -> Iterator[tuple[KeyPath, object]]:
    for path, rule in _entries(source, *_RULES):
        if "match" in rule:
            yield (*path, "match"), rule["match"]
    for path, rule in _entries(source, "protect"):
        yield path, rule


def _empty_matches(source: Source) -> Iterator[tuple[KeyPath, str]]:
    for path, match in _matches(source):
        if match == {}:
            yield (
                path,
                f"{label(path)}: an empty match is refused; write at least one key, such as namespace: batch",
            )


def _same_matches(source: Source) -> Iterator[tuple[KeyPath, str]]:
    first: dict[object, KeyPath] = {}
    for path, match in _matches(source):
        if path[0] == "protect" or not isinstance(match, dict) or not match:
            continue
        other = first.setdefault(_canonical(match), path)
        if other != path:
            there = f"{label(other[:2])} on line {source.place(other).line}"
            yield (
                path,
                f"{label(path)}: matches the same as {there}, and a container may have one rule; change one of them",
            )


def _canonical(value: object) -> object:
    """Equal for matches that mean the same: the order of keys and patterns does not count, nor does a list of one."""
    if isinstance(value, dict):
        return frozenset((key, _canonical(inner)) for key, inner in value.items())
    patterns = value if isinstance(value, list) else [value]
    return frozenset(str(pattern) for pattern in patterns)


def _laws(source: Source) -> Iterator[tuple[KeyPath, str]]:
    for path, rule in _entries(source, "offline"):
        fixed = rule.get("law", "headroom") == "fixed"
        if fixed and "share" not in rule:
            yield (*path, "law"), f"{label(path)}: law fixed has no share; write share: 30%"
        elif "share" in rule and not fixed:
            yield (
                (*path, "share"),
                f"{label(path)}.share: only law fixed has a share; remove it or write law: fixed",
            )
        elif fixed and (floor := _floor_above_share(rule)) is not None:
            yield (
                (*path, "share"),
                f"{label(path)}.share: is below the floor of {floor}; raise it or lower limits.floor",
            )


def _floor_above_share(rule: dict[str, object]) -> str | None:
    limits = rule.get("limits", {})
    default = cast(float, LimitsSection.model_fields["floor"].default)
    try:
        share = quantities.parse_ratio(rule["share"])
        floor = quantities.parse_ratio(limits.get("floor", default) if isinstance(limits, dict) else default)
    except quantities.UnitError:
        return None
    return quantities.format_ratio(floor) if 0 < share < floor else None


def _deadlines(source: Source) -> Iterator[tuple[KeyPath, str]]:
    for path, rule in _entries(source, "periodic"):
        with suppress(quantities.UnitError, KeyError):
            period_ns = quantities.parse_duration_ns(rule["period"])
            if quantities.parse_duration_ns(rule["deadline"]) > period_ns:
                text = f"is above the period, {quantities.format_duration(period_ns)}, and the next request begins then"
                yield (*path, "deadline"), f"{label(path)}.deadline: {text}; write that or less, or leave it out"


def _slos(source: Source) -> Iterator[tuple[KeyPath, str]]:
    for path, rule in _entries(source, "online"):
        slo = rule.get("slo")
        signal = slo.get("signal") if isinstance(slo, dict) else None
        if isinstance(slo, dict) and isinstance(signal, str) and signal in model.SIGNALS:
            yield from _foreign_keys((*path, "slo"), slo, signal)
            yield from _missing_keys((*path, "slo"), slo, signal)
        if isinstance(slo, dict) and isinstance(also := slo.get("also"), dict):
            for key, problem in _also(slo, also):
                yield (*path, "slo", "also", key), f"{label((*path, 'slo'))}.also.{key}: {problem}"


def _also(slo: dict[str, object], also: dict[str, object]) -> Iterator[tuple[str, str]]:
    """What is wrong with the second quantile beside the first: its key, and a text."""
    with suppress(quantities.UnitError, KeyError):
        first, second = quantities.parse_ratio(slo["quantile"]), quantities.parse_ratio(also["quantile"])
        if second == first:
            yield "quantile", "is slo.quantile again; write a lower one such as 0.5, or remove also"
        elif first < second < 1:
            yield "quantile", f"{second:g} is above slo.quantile, {first:g}; exchange the two with their targets"
    with suppress(quantities.UnitError, KeyError):
        target_ns = quantities.parse_duration_ns(slo["target"])
        if quantities.parse_duration_ns(also["target"]) >= target_ns:
            text = f"is not below slo.target, {quantities.format_duration(target_ns)}: a lower quantile is never above"
            yield "target", f"{text} a higher one, so it is kept whenever that is; write less, or remove also"


def _foreign_keys(path: KeyPath, slo: dict[str, object], signal: str) -> Iterator[tuple[KeyPath, str]]:
    for other in model.SIGNALS:
        for key in model.SIGNAL_KEYS[other] if other != signal else ():
            if key in slo:
                text = f"only signal {other} has {key}, and this is {signal}; remove it or write signal: {other}"
                yield (*path, key), f"{label(path)}.{key}: {text}"


def _missing_keys(path: KeyPath, slo: dict[str, object], signal: str) -> Iterator[tuple[KeyPath, str]]:
    for key in model.NEEDED_KEYS[signal]:
        if key not in slo:
            yield (
                (*path, "signal"),
                f"{label(path)}: signal {signal} has no {key}; write {key}: {_example(key)}",
            )
    if signal == "uprobe" and "symbol" not in slo and "offset" not in slo:
        yield (
            (*path, "signal"),
            f"{label(path)}: signal uprobe has neither symbol nor offset; write symbol: {_example('symbol')}",
        )
    elif signal == "uprobe" and "symbol" in slo and "offset" in slo:
        yield (
            (*path, "offset"),
            f"{label(path)}.offset: symbol is given too, and one of them is enough; remove one of them",
        )
    labels = slo.get("labels")
    if signal == "prometheus" and isinstance(labels, dict) and "le" in labels:
        yield (
            (*path, "labels", "le"),
            f"{label(path)}.labels: le names the buckets, and all are needed; remove it",
        )


def _example(key: str) -> str:
    return example(SloSection.model_fields[key])
