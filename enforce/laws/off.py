# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`off`: everything is allowed, and nothing is watched at a launch. For comparisons, and to let one container go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from enforce.model import OnlineOn, Share
from enforce.policy.model import OfflineRule, Tuning


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
