# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The laws: pure functions from latency and state to the share that offline work may use.

`headroom` and `tgs` have a module each. The two that answer the same whatever the latency are here: `fixed` gives the
rule's share, for tests, comparisons and people who know their load; `off` allows everything and watches nothing at a
launch, for comparisons, and to let one container go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from enforce.controller.laws.headroom import Headroom
from enforce.controller.laws.tgs import Tgs
from enforce.model import Law, OnlineOn, Share
from enforce.policy.model import OfflineRule, Tuning

DEFAULT_MAX_QUEUED_NS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant share and queue bound."""

    ratio: float
    max_queued_ns: int
    name: ClassVar[str] = "fixed"

    @classmethod
    def of(cls, rule: OfflineRule, _tuning: Tuning) -> Fixed:
        """With the rule's share, never below its floor."""
        ratio = max(rule.limits.floor_ratio, rule.share_ratio if rule.share_ratio is not None else 1.0)
        return cls(ratio, rule.limits.max_queued_ns or DEFAULT_MAX_QUEUED_NS)

    def start(self) -> None:
        """Has no state."""

    def step(self, state: None, online: OnlineOn, now_ns: int) -> tuple[None, Share]:
        """The same answer each time."""
        return None, Share(self.ratio, self.max_queued_ns, f"fixed share of {self.ratio:.0%}")


@dataclass(frozen=True, slots=True)
class Off:
    """The whole device."""

    name: ClassVar[str] = "off"

    @classmethod
    def of(cls, _rule: OfflineRule, _tuning: Tuning) -> Self:
        """Has no limits."""
        return cls()

    def start(self) -> None:
        """Has no state."""

    def step(self, state: None, online: OnlineOn, now_ns: int) -> tuple[None, Share]:
        """The same answer each time."""
        return None, Share(1.0, 0, "law off: never slowed")


BUILTIN: tuple[type[Any], ...] = (Headroom, Fixed, Tgs, Off)


def law_of(rule: OfflineRule, tuning: Tuning) -> Law[Any]:
    """The law that a rule names, with its limits."""
    for law in BUILTIN:
        if law.name == rule.law:
            made: Law[Any] = law.of(rule, tuning)
            return made
    raise KeyError(rule.law)
