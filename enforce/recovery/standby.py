# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Releases what an agent and its guardian left, as soon as both are gone.

In a pod the guardian shares the agent's fate: when a container ends or runs out of memory, all of its processes are
killed. The standby is in a container of its own and lives on. Invariant: nothing is undone while an agent or a guardian
holds the run directory, so the standby never fights an agent; one that starts meanwhile waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from enforce.actuators.undo import release_all
from enforce.ledger.ledger import unreadable
from enforce.ledger.run_lock import hold_if_unused

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 0.02  # half of the 100 ms in which everything is to run again is spent by what ends the container
ENDING_SECONDS: Final = 75.0  # for an agent that is stopped at the same time
_AGAIN_SECONDS = 1.0  # what could not be undone: a device without room, a disk that is full
Stamp = tuple[int, int, int]


class StandBy:
    """`look` is to be called every LOOK_SECONDS."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._ledger, self._clock = run_dir, run_dir / "ledger.jsonl", clock
        self._done: Stamp | None = None  # of a ledger with nothing to undo
        self._again = 0.0  # not before then

    def look(self) -> bool:
        """Undoes what is left if no agent enforces. True when none does and nothing is left."""
        with hold_if_unused(self._run_dir) as unused:
            if not unused:
                self._again = 0.0
                return False
            return self._stamp() == self._done or (self._clock() >= self._again and self._release())

    def finish(self, received: Callable[[float], int | None] | None) -> bool:
        """On SIGTERM: waits for an agent that is ending too, and looks once more. Whether nothing is left.

        `received` waits so many seconds for a signal, which ends the waiting; None: do not wait.
        """
        until = self._clock() + ENDING_SECONDS
        while not (over := self.look()):
            if received is None or self._clock() >= until or received(LOOK_SECONDS) is not None:
                break
        return over

    def _release(self) -> bool:
        if (why := unreadable(self._ledger)) is not None:
            _log.error("nothing can be undone: %s %s", self._ledger, why)
            self._again = self._clock() + _AGAIN_SECONDS
            return False
        released = release_all(self._ledger)
        left = [one for one in released if not one.closed]
        if len(released) > len(left):
            _log.warning("the agent and its guardian are gone: released %d of their acts", len(released) - len(left))
        for one in left:
            what = "cannot be undone yet, tried again"
            _log.error("%s of %s: %s: %s", one.entry.act, one.entry.container, what, one.error or one.outcome)
        self._done = None if left else self._stamp()
        self._again = self._clock() + _AGAIN_SECONDS if left else 0.0
        return not left

    def _stamp(self) -> Stamp | None:
        try:
            found = os.stat(self._ledger)
        except FileNotFoundError:
            return (0, 0, 0)  # no agent has ever enforced here
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
