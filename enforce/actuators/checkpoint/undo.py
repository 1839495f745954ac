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
_settled: set[ProcessId] = set()


class CheckpointError(WardenError):
    """A process could not be locked, saved or released. The message says why."""


def about_to_act(process: ProcessId) -> None:
    """What is found later may be ours, and may come later than we look."""
    _not_ours.discard(process)
    _settled.discard(process)


def acted(process: ProcessId, foreign: bool = False) -> None:
    """Its helper has answered: nothing comes later. `foreign`: somebody else locked it just before; that stays."""
    _settled.add(process)
    if foreign:
        _not_ours.add(process)


def release_process(entry: Entry, procfs: Procfs) -> Outcome:
    """Raises GoneError, or CheckpointError when it is not released yet."""
    process = entry.process
    if process is None:
        return Outcome.GONE
    check_identity(process, procfs)
    if process in _not_ours:
        return Outcome.RUNNING
    settle_ms = 0 if process in _settled else _settle_ms(entry.wall_ns, time.time_ns())
    answer = ask("release", process, entry.place, settle_ms)
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
