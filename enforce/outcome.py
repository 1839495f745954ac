# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What became of an act that was to be undone."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """What undoing one entry of the ledger came to."""

    RESUMED = "resumed"
    RUNNING = "running"  # it was not stopped; there was nothing to undo
    GONE = "gone"  # the process or place has ended, or its name is another's now
    TRACED = "traced"  # a debugger holds it: left alone, the entry stays
    FAILED = "failed"  # the entry stays

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self in (Outcome.RESUMED, Outcome.RUNNING, Outcome.GONE)
