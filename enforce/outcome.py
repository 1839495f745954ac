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
    RESTORED = "restored"  # a limit is again what it was before
    FOREIGN = "foreign"  # somebody else has changed it since: theirs now, left alone
    TRACED = "traced"  # a debugger holds it: left alone, the entry stays
    FAILED = "failed"  # the entry stays

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self not in (Outcome.TRACED, Outcome.FAILED)
