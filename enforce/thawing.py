# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo a freeze: thaw the very cgroup that the ledger names, if it is we who froze it."""

from __future__ import annotations

from agent import capabilities
from agent.errors import SetupError
from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.freezer import MARKING, Cgroup, Mark, Place
from enforce.outcome import Outcome


def thaw(entry: Entry, _procfs: Procfs) -> Outcome:
    """Raises GoneError, OSError or WardenError."""
    with Cgroup(Place.parse(entry.place)) as cgroup:
        if not capabilities.holds(MARKING):
            raise SetupError(f"whether we froze it cannot be told without {MARKING}: run as root")
        return let_run(cgroup)


def let_run(cgroup: Cgroup) -> Outcome:
    """The mark goes last: until then somebody else may finish this. Raises GoneError or OSError."""
    if cgroup.marked() is None:
        return Outcome.RUNNING  # never frozen, or undone already; if it is frozen now, that was not us
    cgroup.mark(Mark.UNDOING)
    asked = cgroup.is_asked()
    cgroup.thaw()
    if cgroup.marked() is Mark.UNDOING:  # else another one has finished this, and it is frozen anew
        cgroup.unmark()
    return Outcome.RESUMED if asked else Outcome.RUNNING
