# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How each act of the ledger is undone: one way for whoever survives, be it the agent, the guardian or a later start.

In the order in which they are undone: what is quick and lets most workloads run comes first.
"""

from __future__ import annotations

from collections.abc import Callable

from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.mps.restoring import restore
from enforce.outcome import Outcome
from enforce.resuming import resume

Undo = Callable[[Entry, Procfs], Outcome]  # may raise GoneError, OSError, WardenError

UNDO: dict[str, Undo] = {
    "pace": resume,
    "hold": resume,
    "mps": restore,  # slow: a control daemon may hang
}
