# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How each act of the ledger is undone: one way for whoever survives, be it the agent, the guardian or a later start.

In the order in which they are undone: what is quick and lets most workloads run comes first. Thawing comes before
resuming: a process that is frozen does not show that it is stopped, too.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.procfs import Procfs
from enforce.checkpoint.undoing import release_process
from enforce.entries import Entry
from enforce.mps.restoring import restore
from enforce.outcome import Outcome
from enforce.resuming import resume
from enforce.thawing import thaw

Undo = Callable[[Entry, Procfs], Outcome]  # may raise GoneError, OSError, WardenError

UNDO: dict[str, Undo] = {
    "freeze": thaw,
    "pace": resume,
    "hold": resume,
    "lock": release_process,  # after what resumes and thaws: the driver needs the process to run
    "swap": release_process,
    "mps": restore,  # slow: a control daemon may hang
}

MAY_YET_SUCCEED = frozenset({"lock", "swap"})  # where undoing may have to wait for room, or for a process to run

STOPS = frozenset({"pace", "hold"})  # made by the kernel for a guardian to undo; all others are the agent's own
