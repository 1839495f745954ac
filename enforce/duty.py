# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Freezing and thawing one cgroup by turns. One turn is one call of `turn`; it says when the next is due.

Frozen no longer than the rule's longest pause, then thawed for at least the floor's part of the time. Two signs end
it: no mark of ours (somebody undid it as the ledger says), and a state that we did not write (somebody else's: theirs).

Somebody may undo it at any moment, just before we freeze it, too. So it is marked once, at the start, and never over
the mark of whoever undoes it; and after each freezing the mark is looked at: is it gone, we thaw at once. Frozen
without a mark, nobody would ever thaw it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.errors import WardenError
from enforce.freezable import NotFreezableError
from enforce.freezer import Cgroup, Mark
from enforce.policy.model import Limits

LEAST_THAWED_NS: Final = 10_000_000  # shorter ones would be lost in the time that waking up takes
IDLE_NS: Final = 50_000_000
FROZEN_BY_OTHERS: Final = "somebody else has frozen it: left alone"
UNDONE: Final = "it was just undone by somebody else: tried again later"


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
    unsure: bool = False  # it was frozen, and the mark was not seen since

    @classmethod
    def under(cls, limits: Limits, cgroup: Cgroup) -> Duty:
        """With the turns that a rule allows."""
        floor = min(0.99, limits.floor_ratio)
        thawed_ns = max(LEAST_THAWED_NS, int(limits.max_pause_ns * floor / (1 - floor)))
        return cls(cgroup, limits.max_pause_ns, thawed_ns)

    def start(self, now_ns: int) -> None:
        """The first turn. Raises ForeignWriterError, leaving no mark; NotFreezableError when it is being undone."""
        if self.cgroup.is_touched():
            raise ForeignWriterError(FROZEN_BY_OTHERS)
        if not self.cgroup.claim() or not self._freeze(now_ns):
            raise NotFreezableError(UNDONE)

    def turn(self, now_ns: int, allowed: bool, steady: bool) -> bool:
        """Does what is due. False: it was undone by others, and is over. Raises ForeignWriterError, OSError."""
        asked = self.cgroup.is_asked()
        if not self._is_ours():  # read after the state: who undoes it marks it first
            return False
        if asked != self.frozen:
            self.cgroup.unmark()
            was = "thawed" if self.frozen else "frozen"
            raise ForeignWriterError(f"somebody else has {was} it: left alone")
        if self.frozen and (not allowed or (now_ns >= self.due_ns and not steady)):
            self.cgroup.thaw()
            self.frozen, self.due_ns = False, now_ns + self.thawed_ns
        elif not self.frozen and allowed and now_ns >= self.due_ns:
            return self._freeze(now_ns)
        return True

    def next_ns(self, now_ns: int, allowed: bool, steady: bool) -> int:
        """When to call `turn` again."""
        return now_ns + IDLE_NS if not allowed or (self.frozen and steady) else self.due_ns

    def _freeze(self, now_ns: int) -> bool:
        self.cgroup.freeze()
        self.frozen, self.unsure, self.due_ns = True, True, now_ns + self.frozen_ns
        return self._is_ours()

    def _is_ours(self) -> bool:
        if self.cgroup.marked() is Mark.OURS:
            self.unsure = False  # whoever undoes it from now on thaws it after we froze it
            return True
        if self.unsure:
            self.cgroup.thaw()
        self.frozen = self.unsure = False
        return False
