# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undoing beside the guardian's own work: what takes long keeps nobody else from being resumed.

One thread at a time for each, and the entries stay in the ledger: while the agent only hangs, it may yet go on with
them. What is quick has an undoer of its own: giving a process its memory back may take minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from agent.clock import NS_PER_SECOND
from enforce.release import undo_all
from enforce.undoing import STOPS, UNDO

AGAIN_NS: Final = NS_PER_SECOND // 2
QUICK: Final = frozenset({"freeze"})
SLOW: Final = frozenset(UNDO) - QUICK - STOPS  # the guardian resumes: twice would look as if somebody else had done it


class Undoer:
    """Owns the thread."""

    def __init__(self, ledger: Path, clock: Callable[[], int], acts: Collection[str]) -> None:
        self._ledger, self._clock, self._without = ledger, clock, UNDO.keys() - acts
        self._thread: threading.Thread | None = None
        self._began_ns: int | None = None

    def start(self) -> None:
        """Begins now, unless it is at it."""
        if self._thread is None or not self._thread.is_alive():
            self._began_ns = self._clock()
            self._thread = threading.Thread(target=self._undo, name="undo", daemon=True)
            self._thread.start()

    def start_if_due(self) -> None:
        """As `start`, but not many times a second."""
        if self._began_ns is None or self._clock() - self._began_ns >= AGAIN_NS:
            self.start()

    def wait(self) -> None:
        """Until it is done with what it is at."""
        if self._thread is not None:
            self._thread.join()

    def _undo(self) -> None:
        undo_all(self._ledger, without=self._without)
