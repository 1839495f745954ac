# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo `lock` and `swap`: from any state that the driver reports, back to running.

From the ledger's entry alone. A process that does not fit on its device stays saved, and its entry stays, to be tried
again when there is room.
"""

from __future__ import annotations

import time

from agent.core.errors import WardenError
from agent.core.model import ProcessId
from agent.node.pidfd import check_identity
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint.driver import AnswerKind, HelperAnswer, State
from enforce.actuators.checkpoint.helper import LOCK_LIMIT_MS, ask
from enforce.ledger.entries import LedgerEntry, UndoOutcome

_NS_PER_MS = 1_000_000
_SETTLE_MS = LOCK_LIMIT_MS + 1000  # after that a lock that was asked for has taken effect, or has timed out
_OVER = {AnswerKind.GONE: UndoOutcome.GONE, AnswerKind.NO_CUDA: UndoOutcome.RUNNING}
_not_ours: set[ProcessId] = set()
_settled: set[ProcessId] = set()


class CheckpointError(WardenError):
    """A process could not be locked, saved or released. The message says why."""


def about_to_act(process: ProcessId) -> None:
    """A lock found later may be ours, and may take effect after the state was read."""
    _not_ours.discard(process)
    _settled.discard(process)


def acted(process: ProcessId, foreign: bool = False) -> None:
    """Its helper has answered: nothing takes effect later. `foreign`: another program locked it just before."""
    _settled.add(process)
    if foreign:
        _not_ours.add(process)


def release_process(entry: LedgerEntry, procfs: Procfs) -> UndoOutcome:
    """Raises GoneError, or CheckpointError when it is not released yet."""
    process = entry.process
    if process is None:
        return UndoOutcome.GONE
    check_identity(process, procfs)
    if process in _not_ours:
        return UndoOutcome.RUNNING
    settle_ms = 0 if process in _settled else _settle_ms(entry.wall_ns, time.time_ns())
    answer = ask("release", process, entry.place, settle_ms)
    if answer.kind in _OVER:
        return _OVER[answer.kind]
    if answer.kind is not AnswerKind.DONE:
        raise CheckpointError(_why(answer))
    return UndoOutcome.RUNNING if answer.before is State.RUNNING else UndoOutcome.RESUMED


def _settle_ms(intended_wall_ns: int, now_wall_ns: int) -> int:
    """How long the act may still take effect. A clock that was set back makes it longer, by a bound."""
    age_ms = (now_wall_ns - intended_wall_ns) // _NS_PER_MS
    return max(0, min(_SETTLE_MS, _SETTLE_MS - age_ms))


def _why(answer: HelperAnswer) -> str:
    if answer.kind is AnswerKind.NO_ROOM:
        return "its memory does not fit on the device now: it stays saved and is tried again; free device memory"
    return answer.error or str(answer.kind)
