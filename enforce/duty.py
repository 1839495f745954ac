# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Freezing and thawing one cgroup by turns. One turn is one call of `turn`; it says when the next is due.

Frozen no longer than the rule's longest pause, then thawed for at least the floor's part of the time. Two signs end
it: no mark of ours (somebody undid it as the ledger says), and a state that we did not write (somebody else's: theirs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.errors import WardenError
from enforce.freezer import Cgroup, Mark
from enforce.policy.model import Limits

LEAST_THAWED_NS: Final = 10_000_000  # shorter ones would be lost in the time that waking up takes
IDLE_NS: Final = 50_000_000
FROZEN_BY_OTHERS: Final = "somebody else has frozen it: left alone"


class ForeignWriterError(WardenError):
    """Somebody else froze or thawed it. It is theirs from then on."""


@dataclass(slots=True)
class Duty:
    """Where one cgroup stands. Times are CLOCK_MONOTONIC ns."""

    cgroup: Cgroup
    frozen_ns: int
    thawed_ns: int
    frozen: bool = False
    due_ns: int = 0

    @classmethod
    def under(cls, limits: Limits, cgroup: Cgroup) -> Duty:
        """With the turns that a rule allows."""
        floor = min(0.99, limits.floor_ratio)
        thawed_ns = max(LEAST_THAWED_NS, int(limits.max_pause_ns * floor / (1 - floor)))
        return cls(cgroup, limits.max_pause_ns, thawed_ns)

    def start(self, now_ns: int) -> None:
        """The first turn. Raises ForeignWriterError, leaving no mark."""
        if self.cgroup.is_touched():
            raise ForeignWriterError(FROZEN_BY_OTHERS)
        self._freeze(now_ns)

    def turn(self, now_ns: int, allowed: bool, steady: bool) -> bool:
        """Does what is due. False: it was undone by others, and is over. Raises ForeignWriterError, OSError."""
        asked = self.cgroup.is_asked()
        if self.cgroup.marked() is not Mark.OURS:  # read after the state: who undoes it marks it first
            return False
        if asked != self.frozen:
            self.cgroup.unmark()
            was = "thawed" if self.frozen else "frozen"
            raise ForeignWriterError(f"somebody else has {was} it: left alone")
        if self.frozen and (not allowed or (now_ns >= self.due_ns and not steady)):
            self.cgroup.thaw()
            self.frozen, self.due_ns = False, now_ns + self.thawed_ns
        elif not self.frozen and allowed and now_ns >= self.due_ns:
            self._freeze(now_ns)
        return True

    def next_ns(self, now_ns: int, allowed: bool, steady: bool) -> int:
        """When to call `turn` again."""
        return now_ns + IDLE_NS if not allowed or (self.frozen and steady) else self.due_ns

    def _freeze(self, now_ns: int) -> None:
        self.cgroup.mark(Mark.OURS)  # each time: it may have been undone just now, and must be undone again
        self.cgroup.freeze()
        self.frozen, self.due_ns = True, now_ns + self.frozen_ns
