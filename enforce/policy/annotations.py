# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rules made of a pod's own annotations, as far as the policy allows its namespace.

The file's rules win, also where they dispute a container. A user who may create a pod may write anything here, so only
what harms no other pod is accepted: no address to read from, no function to probe, no weight above that of others. A
mistake is reported and the pod left alone; annotations of which one is wrong are ignored as a whole.

What validates them takes 12 MiB of memory, so it is imported when the first pod has annotations that count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

from enforce.policy.model import (
    Classification,
    ContainerFacts,
    OfflineRule,
    OnlineRule,
    PeriodicRule,
    Policy,
    Role,
    Rule,
)
from enforce.policy.quantities import UnitError, parse_duration_ns

PREFIX: Final = "gpuwarden.io/"
NAME: Final = "annotations"  # of the rules: it becomes a label, and is bounded
WINDOW: Final = "10s"
_SLO = re.compile(r"slo-p(?:([1-9][0-9]?(?:\.[0-9]{1,3})?)|(9[0-9]{2,3}))")
_ROLES: Final = {OnlineRule: Role.ONLINE, OfflineRule: Role.OFFLINE, PeriodicRule: Role.PERIODIC}
_CACHE_ENTRIES = 512
_MOST_REPORTED = 3


# What each class may have beside its class (and an online one, its slo-pNN).
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "online": ("signal", "window", "min_samples", "port", "path", "status"),
    "offline": ("weight",),
    "periodic": ("period", "deadline"),
}


def classified(policy: Policy, facts: ContainerFacts) -> Classification:
    """The container's role: by the file and, where no rule of it names the container, by its pod's annotations."""
    found = policy.classify(facts)
    it = facts.container
    if found.role is not Role.UNMATCHED or found.conflict or not it.annotations or not it.namespace or not it.pod:
        return found
    allowed = [role for role, patterns in _allowed(policy) if any(fnmatchcase(it.namespace, one) for one in patterns)]
    if not allowed:
        return _ignored("it has annotations, but annotations of the policy does not name its namespace")
    rule = _read(tuple(sorted(it.annotations.items())))
    if isinstance(rule, str):
        return _ignored(f"its annotations are ignored: {rule}")
    role = _ROLES[type(rule)]
    if role not in allowed:
        return _ignored(f"annotated as {role}, but annotations.{role} of the policy does not name its namespace")
    return Classification(role, rule, "its pod's annotations")


def _allowed(policy: Policy) -> tuple[tuple[Role, tuple[str, ...]], ...]:
    given = policy.annotations
    return ((Role.ONLINE, given.online), (Role.OFFLINE, given.offline), (Role.PERIODIC, given.periodic))


def _ignored(reason: str) -> Classification:
    return Classification(Role.UNMATCHED, None, reason, misconfigured=True)


@lru_cache(_CACHE_ENTRIES)
def _read(annotations: tuple[tuple[str, str], ...]) -> Rule | str:
    """The rule, or every mistake. Pure, and called ten times a second."""
    from agent.config.sections import scalar, value_mistake
    from enforce.policy import load, schema

    values = {key.removeprefix(PREFIX): value for key, value in annotations}
    role = values.pop("class", None)
    if role is None:
        return f"{PREFIX}class is not there; write online, offline or periodic"
    if role not in KEYS:
        return _wrong("class", value_mistake(schema.PodSection, "role", role))
    promises = [key for key in values if role == "online" and _SLO.fullmatch(key)]
    mistakes = [*_mistakes(role, values, promises), *(_promise(promises, values) if role == "online" else ())]
    if mistakes:
        return "; ".join(mistakes[:_MOST_REPORTED])
    head: dict[str, Any] = {"name": NAME, "match": {"pod": "*"}}  # never matched: the rule is this pod's own
    if role == "offline":
        more = {key: scalar(value) for key, value in values.items()}
        return load.offline(schema.OfflineSection.model_validate({**head, **more}))
    if role == "periodic":
        return _periodic(head, values)
    first, *second = [{"quantile": _quantile(key), "target": values.pop(key)} for key in _highest_first(promises)]
    slo = {"signal": "gpu_wait", "window": WINDOW, **{_key(key): scalar(value) for key, value in values.items()}}
    if (problem := _signal_mistake(slo)) is not None:
        return problem
    slo |= {**first, **({"also": second[0]} if second else {})}
    return load.online(schema.OnlineSection.model_validate({**head, "slo": slo}))


def _periodic(head: Mapping[str, Any], values: Mapping[str, str]) -> Rule | str:
    from enforce.policy import load, schema

    if "period" not in values:
        return f"there is no period; write one such as {PREFIX}period: 40ms"
    if parse_duration_ns(values.get("deadline", values["period"])) > parse_duration_ns(values["period"]):
        return _wrong("deadline", f"is above the period; write up to {values['period']}, or leave it out")
    return load.periodic(schema.PeriodicSection.model_validate({**head, **values}))


def _mistakes(role: str, values: Mapping[str, str], promises: list[str]) -> Iterator[str]:
    from agent.config.sections import scalar, value_mistake
    from enforce.policy import schema

    section = schema.PODS[role]
    for key, value in values.items():
        if key in promises:
            text = value_mistake(section, "target", value)
        elif _key(key) in KEYS[role]:
            text = value_mistake(section, _key(key), scalar(value))
        else:
            text = _unknown(role, key)
        if text is not None:
            yield _wrong(key, text)


def _unknown(role: str, key: str) -> str:
    names = [name.replace("_", "-") for name in KEYS[role]] + (["slo-p99"] if role == "online" else [])
    near = get_close_matches(key, names, n=1)
    cure = f"did you mean {near[0]}?" if near else f"write one of: {', '.join(names)}"
    return f"is no annotation of {'a' if role == 'periodic' else 'an'} {role} pod; {cure}"


def _highest_first(promises: list[str]) -> list[str]:
    return sorted(promises, key=_quantile, reverse=True)


def _promise(promises: list[str], values: Mapping[str, str]) -> Iterator[str]:
    """There is one target, or two of which each may bind."""
    if not promises:
        yield f"there is no target; write one such as {PREFIX}slo-p99: 50ms"
    elif len(promises) > 2:
        yield f"there are {len(promises)} targets; write up to two of them"
    elif len(promises) == 2:
        high, low = _highest_first(promises)
        if _quantile(high) == _quantile(low):
            yield f"{high} and {low} are the same quantile; remove one of them"
            return
        with suppress(UnitError):
            if parse_duration_ns(values[low]) >= parse_duration_ns(values[high]):
                text = f"is not below {high}, but a lower quantile is never above a higher one"
                yield _wrong(low, f"{text}; write less than {values[high]}, or remove it")


def _signal_mistake(slo: Mapping[str, Any]) -> str | None:
    """A key that the signal lacks, or that belongs to another one."""
    foreign = [key for key in ("port", "path", "status") if key in slo and slo["signal"] != "http"]
    if foreign:
        return _wrong(foreign[0], f"only signal http has {foreign[0]}; write {PREFIX}signal: http, or leave it out")
    if slo["signal"] == "http" and "port" not in slo:
        return _wrong("signal", f"signal http has no port; write one such as {PREFIX}port: 8000")
    return None


def _wrong(key: str, text: str | None) -> str:
    return f"{PREFIX}{key}: {text}"


def _key(key: str) -> str:
    return key.replace("-", "_")


def _quantile(key: str) -> float:
    """slo-p99 → 0.99, slo-p99.9 and slo-p999 → 0.999."""
    found = _SLO.fullmatch(key)
    assert found is not None
    percent, digits = found[1], found[2]
    return float(f"0.{digits}") if digits else round(float(percent) / 100, 6)
