# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Clocks of tests: one that the test sets, one that only sleeping moves, and the real one with jumps ahead."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.core.clock import monotonic_ns


@dataclass(slots=True)
class SetClock:
    """Shows what the test sets."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns

    @property
    def now_us(self) -> int:
        """The same in µs."""
        return self.now_ns // 1000


@dataclass(slots=True)
class SleepClock:
    """Seconds that pass by `sleep`, as from `time`; `stall_seconds` more each time, as on a busy machine."""

    now: float = 0.0
    stall_seconds: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        """Notes the pause, and moves on."""
        self.pauses.append(seconds)
        self.now += seconds + self.stall_seconds


@dataclass(slots=True)
class AheadClock:
    """Real time, and what the test added to it: so that no test waits for the pause between two attempts."""

    ahead_ns: int = 0

    def __call__(self) -> int:
        return monotonic_ns() + self.ahead_ns
