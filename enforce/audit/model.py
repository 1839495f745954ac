# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The words of explaining, and the document that the agent's socket answers with.

Times are CLOCK_MONOTONIC while the agent keeps them and CLOCK_REALTIME in the document. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model import Container

VERSION = 1
MOST_PARTS = 4  # reasons, and online containers, that one interval tells apart


@dataclass(frozen=True, slots=True)
class Who:
    """A container, as people may name it, and what it is to the policy."""

    key: str
    name: str
    pod: str | None = None
    namespace: str | None = None
    id: str = ""
    role: str = ""  # "" where only the decision log is known
    rule: str | None = None
    reason: str = ""  # of the role

    @classmethod
    def of(cls, container: Container, role: str, rule: str | None, reason: str) -> Who:
        """With the names of a container."""
        return cls(container.key, container.name, container.pod, container.namespace, container.id, role, rule, reason)


@dataclass(slots=True)
class Why:
    """A reason, in the words of its latest decision, and how long it held."""

    text: str
    seconds: float = 0.0


@dataclass(slots=True)
class Whom:
    """The online container that it was done for."""

    name: str
    device: str
    quantile: float
    target_ns: int
    seconds: float = 0.0
    missed_seconds: float = 0.0  # with a latency over the target
    latency_ns: float | None = None  # the longest of the SLO's quantile


@dataclass(frozen=True, slots=True)
class Brought:
    """What a decision brought: the online side when it was taken, and one SLO window later."""

    decided_ns: int
    window_ns: int
    latency_before_ns: float | None
    latency_ns: float | None
    slack_before_ratio: float | None
    slack_ratio: float | None


@dataclass(slots=True)
class Interval:
    """A stretch of one offline container's time in which the decisions were alike."""

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
    reasons: dict[str, Why] = field(default_factory=dict)  # by the reason without its figures
    whom: dict[str, Whom] = field(default_factory=dict)  # by container key
    troubles: dict[str, str] = field(default_factory=dict)  # rung → why it could not be done
    brought: Brought | None = None  # by the latest decision that a window has passed since

    @property
    def kind(self) -> tuple[object, ...]:
        """Only intervals of the same kind are ever merged."""
        return (self.acted, self.rule, self.law)

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """The latest decision has been in force for so much longer. `parts`: its reason and its ruler."""
        reason, ruler = parts
        if (why := self.reasons.get(reason)) is not None:
            why.seconds += seconds
        if (whom := self.whom.get(ruler)) is not None:
            whom.seconds += seconds
            if whom.latency_ns is not None and whom.latency_ns > whom.target_ns:
                whom.missed_seconds += seconds

    def again(self, share: float, queued_ns: int, whom: Whom, latency_ns: float | None) -> None:
        """One more decision of the same reason, for the same `whom`."""
        self.decisions += 1
        self.share_low, self.share_high = min(self.share_low, share), max(self.share_high, share)
        self.queued_low_ns, self.queued_high_ns = (
            min(self.queued_low_ns, queued_ns),
            max(self.queued_high_ns, queued_ns),
        )
        whom.latency_ns = _most(whom.latency_ns, latency_ns)

    def absorb(self, later: Interval) -> None:
        """Takes in the interval that follows it. The reasons and online containers of least time are forgotten."""
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
        for reason, why in later.reasons.items():
            before = self.reasons.get(reason)
            self.reasons[reason] = why if before is None else Why(why.text, before.seconds + why.seconds)
        for ruler, whom in later.whom.items():
            self.whom[ruler] = _joined(self.whom.get(ruler), whom)
        _cut(self.reasons, next(iter(later.reasons), ""))
        _cut(self.whom, next(iter(later.whom), ""))


@dataclass(slots=True)
class Kept:
    """A stretch of one online container's time, in which its promise was kept, missed, or not to be judged."""

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

    @property
    def kind(self) -> tuple[object, ...]:
        """Only intervals of the same kind are ever merged."""
        return (self.rule, self.signal, self.quantile, self.target_ns)

    def hold(self, seconds: float, parts: tuple[str, ...]) -> None:
        """The latest reading has stood for so much longer. `parts`: what it meant."""
        if parts[0] == "kept":
            self.kept_seconds += seconds
        elif parts[0] == "missed":
            self.missed_seconds += seconds
        else:
            self.unknown_seconds += seconds

    def absorb(self, later: Kept) -> None:
        """Takes in the interval that follows it."""
        self.until_ns = later.until_ns
        self.kept_seconds += later.kept_seconds
        self.missed_seconds += later.missed_seconds
        self.unknown_seconds += later.unknown_seconds
        self.latency_low_ns = _least(self.latency_low_ns, later.latency_low_ns)
        self.latency_high_ns = _most(self.latency_high_ns, later.latency_high_ns)


@dataclass(frozen=True, slots=True)
class Slowed:
    """One offline container that was held for an online one, and for how long."""

    key: str
    name: str
    seconds: float
    share_low: float
    paused_seconds: float  # in the intervals in question: it may have been held for others in them too


@dataclass(frozen=True, slots=True)
class Story:
    """What happened to one container, the oldest first."""

    who: Who
    intervals: tuple[Interval, ...] = ()  # offline
    kept: tuple[Kept, ...] = ()  # online
    slowed: tuple[Slowed, ...] = ()  # for it


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer: everybody whom there is something to say about, and the story of the one that was asked for."""

    version: int
    wall_ns: int
    since_wall_ns: int | None  # from when on decisions are remembered
    has_policy: bool
    enforcing: bool
    containers: tuple[Who, ...] = ()
    story: Story | None = None
    forgotten: Mapping[str, int] = field(default_factory=dict)  # what had no room → how often


def _joined(before: Whom | None, later: Whom) -> Whom:
    if before is None:
        return later
    return Whom(
        later.name,
        later.device,
        later.quantile,
        later.target_ns,
        before.seconds + later.seconds,
        before.missed_seconds + later.missed_seconds,
        _most(before.latency_ns, later.latency_ns),
    )


def _cut(parts: dict[str, Why] | dict[str, Whom], keep: str) -> None:
    while len(parts) > MOST_PARTS:
        del parts[min((name for name in parts if name != keep), key=lambda name: parts[name].seconds)]


def _most(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def _least(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)
