# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What decisions brought: each is looked at again one SLO window later. Pure but for the list of those that wait."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from enforce.decisions import Decision

MOST_WAITING = 8192  # 80 containers whose every decision, ten a second, is another one, and a window of ten seconds


@dataclass(frozen=True, slots=True)
class Effect:
    """The line that follows a decision's line. `decision_wall_ns` and `container` say which one. None: unknown."""

    wall_ns: int
    container: str
    device: str
    ruler: str
    decision_wall_ns: int
    window_ns: int
    latency_ns: float | None
    samples: int
    target_ns: int
    slack_ratio: float | None
    share: float | None  # in force now
    max_queued_ns: int | None
    paused_ratio: float | None  # of the window; the mean over its processes


@dataclass(frozen=True, slots=True, order=True)
class Awaited:
    """A decision, and when to look at what it brought."""

    due_ns: int
    number: int
    decided_ns: int = field(compare=False)
    window_ns: int = field(compare=False)
    decision: Decision = field(compare=False)


class Effects:
    """Decisions that a window has not yet passed since. Bounded: `skipped` counts those that found no room."""

    def __init__(self) -> None:
        self._waiting: list[Awaited] = []
        self._number = 0
        self.skipped = 0

    def expect(self, decision: Decision, window_ns: int, now_ns: int) -> None:
        """Look at this one again in a window's time."""
        if len(self._waiting) >= MOST_WAITING:
            self.skipped += 1
            return
        self._number += 1
        heapq.heappush(self._waiting, Awaited(now_ns + window_ns, self._number, now_ns, window_ns, decision))

    def due(self, now_ns: int) -> list[Awaited]:
        """Those that a window has passed since; each is given once."""
        found = []
        while self._waiting and self._waiting[0].due_ns <= now_ns:
            found.append(heapq.heappop(self._waiting))
        return found
