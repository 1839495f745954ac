# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo `lock` and `swap`: from whatever state the driver says the process is in, back to running.

From the ledger's entry alone. A process that does not fit on its device stays saved, and its entry stays, to be tried
again when there is room.
"""

from __future__ import annotations

import time

from agent.errors import WardenError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.checkpoint.answer import Answer, Kind
from enforce.checkpoint.driver import State
from enforce.checkpoint.helper import LOCK_LIMIT_MS, ask
from enforce.checkpoint.running import check_identity
from enforce.entries import Entry
from enforce.outcome import Outcome

_NS_PER_MS = 1_000_000
_SETTLE_MS = LOCK_LIMIT_MS + 1000  # after that a lock that was asked for has come to be, or has given up
_OVER = {Kind.GONE: Outcome.GONE, Kind.NO_CUDA: Outcome.RUNNING}
_not_ours: set[ProcessId] = set()


class CheckpointError(WardenError):
    """A process could not be locked, saved or released. The message says why."""


def not_ours(process: ProcessId) -> None:
    """Somebody else locked it in the moment before we would have: that is not to be undone."""
    _not_ours.add(process)


def ours_again(process: ProcessId) -> None:
    """It was found running: what comes next may be ours."""
    _not_ours.discard(process)


def release_process(entry: Entry, procfs: Procfs) -> Outcome:
    """Raises GoneError, or CheckpointError when it is not released yet."""
    process = entry.process
    if process is None:
        return Outcome.GONE
    check_identity(process, procfs)
    if process in _not_ours:
        return Outcome.RUNNING
    answer = ask("release", process, entry.place, _settle_ms(entry.wall_ns, time.time_ns()))
    if answer.kind in _OVER:
        return _OVER[answer.kind]
    if answer.kind is not Kind.DONE:
        raise CheckpointError(_why(answer))
    return Outcome.RUNNING if answer.before is State.RUNNING else Outcome.RESUMED


def _settle_ms(intended_wall_ns: int, now_wall_ns: int) -> int:
    """How long the act may still come to be. A clock that was set back makes it longer, by a bound."""
    age_ms = (now_wall_ns - intended_wall_ns) // _NS_PER_MS
    return max(0, min(_SETTLE_MS, _SETTLE_MS - age_ms))


def _why(answer: Answer) -> str:
    if answer.kind is Kind.NO_ROOM:
        return "its memory does not fit on the device now: it stays saved and is tried again; free device memory"
    return answer.error or str(answer.kind)
