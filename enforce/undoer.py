# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undoing beside the guardian's own work: what takes long keeps nobody else from being resumed.

One thread at a time, and the entries stay in the ledger: while the agent only hangs, it may yet go on with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.clock import NS_PER_SECOND
from enforce.release import undo_all

AGAIN_NS: Final = NS_PER_SECOND // 2
RESUMED_BY_THE_GUARDIAN: Final = ("pace", "hold")  # twice would look as if somebody else had resumed them


class Undoer:
    """Owns the thread."""

    def __init__(self, ledger: Path, clock: Callable[[], int]) -> None:
        self._ledger, self._clock = ledger, clock
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
        undo_all(self._ledger, without=RESUMED_BY_THE_GUARDIAN)
