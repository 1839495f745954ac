# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a pod says of itself: rules made of its annotations, as far as the policy lets its namespace.

The file's rules win, and so does a dispute among them. Whoever may write a pod may write anything here, so only what
harms nobody else can be said: no address or function to look at, and no weight above everybody's own. A mistake is
told and the pod left alone; nothing is taken of annotations of which a part is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

from pydantic_core import PydanticCustomError

from enforce.policy import convert, schema
from enforce.policy.kind import Kind, mistake, quote, scalar
from enforce.policy.model import Classification, Facts, OfflineRule, OnlineRule, Policy, Role
from enforce.policy.quantities import Weight
from enforce.policy.sections import kind_at
from enforce.policy.words import Word

PREFIX: Final = "gpuwarden.io/"
NAME: Final = "annotations"  # of the rules: it becomes a label, and is bounded
WINDOW: Final = "10s"
_SLO = re.compile(r"slo-p(?:([1-9][0-9]?(?:\.[0-9]{1,3})?)|(9[0-9]{2,3}))")
_MOST_REMEMBERED = 512
_MOST_TOLD = 3


@dataclass(frozen=True)
class _Modest(Weight):
    """At most what everybody has: more is the policy's to give."""

    most: float = 1

    def read(self, value: object) -> float:
        if isinstance(value, (int, float)) and value > self.most:
            raise mistake(f"{quote(value)} is more than others have", "write up to 1; only the policy file gives more")
        return super().read(value)


CLASS: Final = Word(("online", "offline"))
TARGET: Final = kind_at(schema.SloSection, "target")
# What each class may say beside its class (and of an online one, its slo-pNN), and what kind of value that is.
KEYS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "online": {
        "signal": Word(("gpu_wait", "http")),
        "window": kind_at(schema.SloSection, "window"),
        "min_samples": kind_at(schema.SloSection, "min_samples"),
        "port": kind_at(schema.SloSection, "port"),
        "path": kind_at(schema.SloSection, "path"),
    },
    "offline": {"weight": _Modest()},
}


def classified(policy: Policy, facts: Facts) -> Classification:
    """The container's role: by the file and, where no rule of it names the container, by its pod's annotations."""
    found = policy.classify(facts)
    it = facts.container
    if found.role is not Role.UNMATCHED or found.conflict or not it.annotations or not it.namespace or not it.pod:
        return found
    allowed = [role for role, patterns in _allowed(policy) if any(fnmatchcase(it.namespace, one) for one in patterns)]
    if not allowed:
        return _amiss("it has annotations, but annotations of the policy does not name its namespace")
    rule = _read(tuple(sorted(it.annotations.items())))
    if isinstance(rule, str):
        return _amiss(f"its annotations are not taken: {rule}")
    role = Role.ONLINE if isinstance(rule, OnlineRule) else Role.OFFLINE
    if role not in allowed:
        return _amiss(f"annotated as {role}, but annotations.{role} of the policy does not name its namespace")
    return Classification(role, rule, "its pod's annotations")


def _allowed(policy: Policy) -> tuple[tuple[Role, tuple[str, ...]], ...]:
    return ((Role.ONLINE, policy.annotations.online), (Role.OFFLINE, policy.annotations.offline))


def _amiss(reason: str) -> Classification:
    return Classification(Role.UNMATCHED, None, reason, amiss=True)


@lru_cache(_MOST_REMEMBERED)
def _read(said: tuple[tuple[str, str], ...]) -> OnlineRule | OfflineRule | str:
    """The rule, or every mistake. Pure, and asked for ten times a second."""
    values = {key.removeprefix(PREFIX): value for key, value in said}
    kind = values.pop("class", None)
    if kind is None or kind not in KEYS:
        return _refused(kind)
    promises = [key for key in values if kind == "online" and _SLO.fullmatch(key)]
    mistakes = [*_mistakes(kind, values, promises), *(_promise(promises) if kind == "online" else ())]
    if mistakes:
        return "; ".join(mistakes[:_MOST_TOLD])
    head: dict[str, Any] = {"name": NAME, "match": {"pod": "*"}}  # nobody asks: it is this pod's own
    if kind == "offline":
        more = {key: scalar(value) for key, value in values.items()}
        return convert.offline(schema.OfflineSection.model_validate({**head, **more}))
    target = values.pop(promises[0])
    slo = {"signal": "gpu_wait", "window": WINDOW, **{_key(key): scalar(value) for key, value in values.items()}}
    if (problem := _unlike(slo)) is not None:
        return problem
    slo |= {"quantile": _quantile(promises[0]), "target": target}
    return convert.online(schema.OnlineSection.model_validate({**head, "slo": slo}))


def _refused(kind: str | None) -> str:
    if kind is None:
        return f"{PREFIX}class is not there; write online or offline"
    return next(_unfit("class", CLASS, kind))


def _mistakes(kind: str, values: Mapping[str, str], promises: list[str]) -> Iterator[str]:
    for key, value in values.items():
        known = TARGET if key in promises else KEYS[kind].get(_key(key))
        if known is None:
            names = [name.replace("_", "-") for name in KEYS[kind]] + (["slo-p99"] if kind == "online" else [])
            near = get_close_matches(key, names, n=1)
            cure = f"did you mean {near[0]}?" if near else f"write one of: {', '.join(names)}"
            yield _told(key, f"is nothing that an {kind} pod can say; {cure}")
        else:
            yield from _unfit(key, known, value if known is TARGET else scalar(value))


def _promise(promises: list[str]) -> Iterator[str]:
    if len(promises) != 1:
        count = "no promise is there" if not promises else f"{' and '.join(promises)} are both there"
        yield f"{count}; write one such as {PREFIX}slo-p99: 50ms"


def _unlike(slo: Mapping[str, Any]) -> str | None:
    """What the signal lacks, or what is another one's."""
    foreign = [key for key in ("port", "path") if key in slo and slo["signal"] != "http"]
    if foreign:
        return _told(foreign[0], f"only signal http has {foreign[0]}; write {PREFIX}signal: http, or leave it out")
    if slo["signal"] == "http" and "port" not in slo:
        return _told("signal", f"signal http has no port; write one such as {PREFIX}port: 8000")
    return None


def _unfit(key: str, kind: Kind, value: object) -> Iterator[str]:
    try:
        kind.read(value)
    except PydanticCustomError as error:
        yield _told(key, error.message())


def _told(key: str, what: str) -> str:
    return f"{PREFIX}{key}: {what}"


def _key(key: str) -> str:
    return key.replace("-", "_")


def _quantile(key: str) -> float:
    """slo-p99 → 0.99, slo-p99.9 and slo-p999 → 0.999."""
    found = _SLO.fullmatch(key)
    assert found is not None
    percent, digits = found[1], found[2]
    return float(f"0.{digits}") if digits else round(float(percent) / 100, 6)
