# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The history of containers as values, which are also the document that `explain` is answered with. Pure.

Times are CLOCK_MONOTONIC while the agent keeps them and CLOCK_REALTIME in the document. Unknown is None. Also here:
which container a name, pod, namespace/pod, key or beginning of an id means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.core.errors import WardenError
from agent.core.model import Container
from agent.core.text import joined, printable

VERSION = 1
MOST_PARTS = 4  # reasons, and online containers, that one interval keeps apart


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """A container with its names, and its role by the policy."""

    key: str
    name: str
    pod: str | None = None
    namespace: str | None = None
    id: str = ""
    role: str = ""  # "" where only the decision log is known
    rule: str | None = None
    reason: str = ""  # of the role

    @classmethod
    def of(cls, container: Container, role: str, rule: str | None, reason: str) -> ContainerInfo:
        """With the names of a container."""
        return cls(container.key, container.name, container.pod, container.namespace, container.id, role, rule, reason)


@dataclass(slots=True)
class DecisionReason:
    """A reason, with the figures of its latest decision, and how long it held."""

    text: str
    seconds: float = 0.0


@dataclass(slots=True)
class Ruler:
    """The online container that an offline one was held for, by one quantile of its SLO, in one interval."""

    key: str
    name: str
    device: str
    quantile: float
    target_ns: int
    seconds: float = 0.0
    missed_seconds: float = 0.0  # with a latency over the target
    latency_ns: float | None = None  # the longest of the SLO's quantile


@dataclass(frozen=True, slots=True)
class DecisionEffect:
    """Latency and slack of the online side when a decision was made, and one SLO window later."""

    decided_ns: int
    window_ns: int
    latency_before_ns: float | None
    latency_ns: float | None
    slack_before_ratio: float | None
    slack_ratio: float | None


@dataclass(slots=True)
class OfflineInterval:
    """An interval of one offline container in which the decisions were alike. Its fields are the document's."""

    since_ns: int
    until_ns: int
    acted: bool
    rule: str
    law: str
    share_low: float
    share_high: float
    queued_low_ns: int
    queued_high_ns: int
    pauses: int = 0
    paused_seconds: float = 0.0
    decisions: int = 1
    means: tuple[str, ...] = ()
    reasons: dict[str, DecisionReason] = field(default_factory=dict)  # by the reason without its figures
    whom: dict[str, Ruler] = field(default_factory=dict)  # by container key, with a second quantile "KEY p50"
    troubles: dict[str, str] = field(default_factory=dict)  # rung → why it could not be done
    brought: DecisionEffect | None = None  # by the latest decision that a window has passed since

    @property
    def kind(self) -> tuple[object, ...]:
        """Only intervals of the same kind are ever merged."""
        return (self.acted, self.rule, self.law)

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """Extends the latest decision by so many seconds. `parts`: its reason and its ruler."""
        reason, ruler = parts
        if (known := self.reasons.get(reason)) is not None:
            known.seconds += seconds
        if (held_for := self.whom.get(ruler)) is not None:
            held_for.seconds += seconds
            if held_for.latency_ns is not None and held_for.latency_ns > held_for.target_ns:
                held_for.missed_seconds += seconds

    def repeat(self, share: float, queued_ns: int, ruler: Ruler, latency_ns: float | None) -> None:
        """Adds a decision with the same reason, for the same `ruler`, which is one of `whom`."""
        self.decisions += 1
        self.share_low, self.share_high = min(self.share_low, share), max(self.share_high, share)
        self.queued_low_ns, self.queued_high_ns = (
            min(self.queued_low_ns, queued_ns),
            max(self.queued_high_ns, queued_ns),
        )
        ruler.latency_ns = _most(ruler.latency_ns, latency_ns)

    def absorb(self, later: OfflineInterval) -> None:
        """Merges the next interval into it. The reasons and online containers of least time are dropped."""
        self.until_ns = later.until_ns
        self.share_low, self.share_high = (
            min(self.share_low, later.share_low),
            max(self.share_high, later.share_high),
        )
        self.queued_low_ns = min(self.queued_low_ns, later.queued_low_ns)
        self.queued_high_ns = max(self.queued_high_ns, later.queued_high_ns)
        self.pauses += later.pauses
        self.paused_seconds += later.paused_seconds
        self.decisions += later.decisions
        self.means = self.means if later.means == self.means else tuple(dict.fromkeys(self.means + later.means))
        self.brought = later.brought or self.brought
        if later.troubles:
            self.troubles |= later.troubles
        for reason, known in later.reasons.items():
            before = self.reasons.get(reason)
            seconds = known.seconds if before is None else before.seconds + known.seconds
            self.reasons[reason] = DecisionReason(known.text, seconds)
        for key, ruler in later.whom.items():
            self.whom[key] = _merged(self.whom.get(key), ruler)
        _cut(self.reasons, next(iter(later.reasons), ""))
        _cut(self.whom, next(iter(later.whom), ""))


@dataclass(frozen=True, slots=True)
class SecondQuantile:
    """The second quantile of an SLO in one interval."""

    quantile: float
    target_ns: int
    latency_low_ns: float | None = None
    latency_high_ns: float | None = None


@dataclass(slots=True)
class OnlineInterval:
    """An interval of one online container: how long its SLO was kept, missed, or could not be judged."""

    since_ns: int
    until_ns: int
    rule: str
    signal: str
    quantile: float
    target_ns: int
    kept_seconds: float = 0.0
    missed_seconds: float = 0.0
    unknown_seconds: float = 0.0  # too few requests
    latency_low_ns: float | None = None
    latency_high_ns: float | None = None
    also: SecondQuantile | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Only intervals of the same kind are ever merged."""
        also = None if self.also is None else (self.also.quantile, self.also.target_ns)
        return (self.rule, self.signal, self.quantile, self.target_ns, also)

    def state(self) -> str:
        """Whether its SLO is kept or missed by its latest reading, which is all that it has; or unknown."""
        if self.latency_high_ns is None:
            return "unknown"
        also = self.also
        missed_also = also is not None and also.latency_high_ns is not None and also.latency_high_ns > also.target_ns
        return "missed" if missed_also or self.latency_high_ns > self.target_ns else "kept"

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """Extends the latest reading by so many seconds. `parts`: its state."""
        if parts[0] == "kept":
            self.kept_seconds += seconds
        elif parts[0] == "missed":
            self.missed_seconds += seconds
        else:
            self.unknown_seconds += seconds

    def absorb(self, later: OnlineInterval) -> None:
        """Merges the next interval into it."""
        self.until_ns = later.until_ns
        self.kept_seconds += later.kept_seconds
        self.missed_seconds += later.missed_seconds
        self.unknown_seconds += later.unknown_seconds
        self.latency_low_ns = _least(self.latency_low_ns, later.latency_low_ns)
        self.latency_high_ns = _most(self.latency_high_ns, later.latency_high_ns)
        if self.also is not None and later.also is not None:
            low_ns = _least(self.also.latency_low_ns, later.also.latency_low_ns)
            high_ns = _most(self.also.latency_high_ns, later.also.latency_high_ns)
            self.also = replace(self.also, latency_low_ns=low_ns, latency_high_ns=high_ns)


@dataclass(frozen=True, slots=True)
class SlowedContainer:
    """One offline container that was held for an online one, and for how long."""

    key: str
    name: str
    seconds: float
    share_low: float
    paused_seconds: float  # in the intervals in question: it may have been held for others in them too


@dataclass(frozen=True, slots=True)
class ContainerHistory:
    """The last hour of one container, the oldest interval first."""

    who: ContainerInfo
    intervals: tuple[OfflineInterval, ...] = ()  # offline
    kept: tuple[OnlineInterval, ...] = ()  # online
    slowed: tuple[SlowedContainer, ...] = ()  # for it


@dataclass(frozen=True, slots=True)
class Explanation:
    """The document: all containers that are known, and the history of the one that was asked for."""

    version: int
    wall_ns: int
    since_wall_ns: int | None  # from when on decisions are remembered
    has_policy: bool
    enforcing: bool
    containers: tuple[ContainerInfo, ...] = ()
    story: ContainerHistory | None = None
    forgotten: Mapping[str, int] = field(default_factory=dict)  # what had no room → how often


def _merged(before: Ruler | None, later: Ruler) -> Ruler:
    if before is None:
        return later
    return Ruler(
        later.key,
        later.name,
        later.device,
        later.quantile,
        later.target_ns,
        before.seconds + later.seconds,
        before.missed_seconds + later.missed_seconds,
        _most(before.latency_ns, later.latency_ns),
    )


def _cut(parts: dict[str, DecisionReason] | dict[str, Ruler], keep: str) -> None:
    while len(parts) > MOST_PARTS:
        del parts[min((name for name in parts if name != keep), key=lambda name: parts[name].seconds)]


def _most(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def _least(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


SHORTEST_ID = 4
MOST_LISTED = 20


def choose(wanted: str, known: Sequence[ContainerInfo]) -> ContainerInfo:
    """The container that `wanted` means. WardenError lists the known ones if it is none or several of them."""
    for fits in (_is_key, _is_name, _begins_id):
        found = sorted((one for one in known if fits(one, wanted)), key=lambda one: (one.name, one.key))
        if len(found) == 1:
            return found[0]
        if found:
            raise WardenError(f"{shown(wanted)} means more than one container, give the key of one:\n{listed(found)}")
    if not known:
        raise WardenError(f"nothing is known about {shown(wanted)}, nor about any other container")
    others = sorted(known, key=lambda one: (one.role != "offline", one.name, one.key))
    raise WardenError(f"nothing is known about {shown(wanted)}; these containers are known:\n{listed(others)}")


def listed(containers: Sequence[ContainerInfo]) -> str:
    """One line each: role, names, key."""
    lines = [f"  {one.role or '?':<9} {shown(title(one))}  ({shown(one.key)})" for one in containers[:MOST_LISTED]]
    more = len(containers) - MOST_LISTED
    return "\n".join([*lines, f"  and {more} more"] if more > 0 else lines)


def title(container: ContainerInfo) -> str:
    """namespace/pod: name, as far as they are known."""
    pod = joined(container.namespace, container.pod)
    return f"{pod}: {container.name}" if pod else container.name


def shown(name: str) -> str:
    """A name from outside, shortened and made printable."""
    return printable(name, 160)


def _is_key(container: ContainerInfo, wanted: str) -> bool:
    return wanted == container.key


def _is_name(container: ContainerInfo, wanted: str) -> bool:
    pod = f"{container.namespace}/{container.pod}" if container.namespace and container.pod else None
    whole = f"{pod}/{container.name}" if pod else None
    return wanted in (container.name, container.pod, pod, container.id or None, whole)


def _begins_id(container: ContainerInfo, wanted: str) -> bool:
    return len(wanted) >= SHORTEST_ID and (container.id or container.key.rpartition(":")[2]).startswith(wanted)
