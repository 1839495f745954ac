# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How each act of the ledger is undone: one way for the agent, the guardian, `gpuwarden release` and the next start.

Owns the table `UNDO`. Touches only what the ledger names, and only if it is that very process or place. An act that
cannot be undone does not keep the others waiting: quick acts come first, and beside the guardian's own work the slow
ones have a thread of their own, as giving a process its memory back may take minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import GoneError, WardenError
from agent.core.worker import BackgroundJob
from agent.node.procfs import Procfs, this_boot
from enforce.actuators.checkpoint.helper import release_process
from enforce.actuators.freezer.cgroup import thaw
from enforce.actuators.launch.resume import resume
from enforce.actuators.mps.restore import restore
from enforce.ledger import ledger
from enforce.ledger.entries import LedgerEntry, UndoOutcome

AGAIN_NS: Final = NS_PER_SECOND // 2  # between two runs of a BackgroundUndo that is asked for more often
_LOCK_AGAIN_SECONDS = 0.02
UndoFunction = Callable[[LedgerEntry, Procfs], UndoOutcome]  # may raise GoneError, OSError, WardenError


class MadeBy(Enum):
    """What carries out an act, and so who undoes it while the agent lives."""

    KERNEL = "kernel"  # at a launch or an allocation; undone by the guardian
    AGENT = "agent"  # undone by the agent's own rungs


@dataclass(frozen=True, slots=True)
class ActUndo:
    """How one act is undone. `quick`: without waiting for a daemon, a driver or a copy of memory."""

    undo: UndoFunction
    made_by: MadeBy
    quick: bool
    retryable: bool = False  # it may have to wait for room on a device, or for the process to run


UNDO: Final[dict[str, ActUndo]] = {
    # In this order: what is quick and lets most workloads run comes first. Thawing comes before resuming, as a frozen
    # process does not show that it is stopped as well; unlocking after both, as the driver needs the process to run. A
    # process that is locked and saved is given back its memory by the entry that says how much that is.
    "freeze": ActUndo(thaw, MadeBy.AGENT, quick=True),
    "pace": ActUndo(resume, MadeBy.KERNEL, quick=True),
    "hold": ActUndo(resume, MadeBy.KERNEL, quick=True),
    "swap": ActUndo(release_process, MadeBy.AGENT, quick=False, retryable=True),
    "lock": ActUndo(release_process, MadeBy.AGENT, quick=False, retryable=True),
    "mps": ActUndo(restore, MadeBy.AGENT, quick=False),  # a control daemon may hang
}


def acts_where(made_by: MadeBy | None = None, quick: bool | None = None) -> frozenset[str]:
    """The acts of the table with these properties; None: whichever."""
    return frozenset(
        act for act, how in UNDO.items() if made_by in (None, how.made_by) and (quick is None or quick == how.quick)
    )


@dataclass(frozen=True, slots=True)
class UndoResult:
    """One entry of the ledger, and what undoing it came to."""

    entry: LedgerEntry
    outcome: UndoOutcome
    error: str | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self.outcome.closed


def undo(entry: LedgerEntry, boot: str, proc_root: str = "/proc") -> UndoResult:
    """Undoes one act; its entry in the ledger is not touched. Never raises."""
    if entry.boot and boot and entry.boot != boot:
        return UndoResult(entry, UndoOutcome.GONE)
    how = UNDO.get(entry.act)
    if how is None:
        error = f"this version does not know the act {entry.act!r}: use the newer one"
        return UndoResult(entry, UndoOutcome.FAILED, error)
    try:
        return UndoResult(entry, how.undo(entry, Procfs(proc_root)))
    except (GoneError, ProcessLookupError):
        return UndoResult(entry, UndoOutcome.GONE)
    except (OSError, WardenError) as error:
        return UndoResult(entry, UndoOutcome.FAILED, str(error))


def undo_all(
    ledger_path: str | os.PathLike[str], proc_root: str = "/proc", acts: Collection[str] | None = None
) -> list[UndoResult]:
    """Undoes what the ledger has outstanding. Its entries stay: the process that wrote them may yet go on.

    `acts`: only these. Needs neither the ledger's lock nor space on its disk.
    """
    boot = this_boot()
    return [undo(entry, boot, proc_root) for entry in _outstanding(ledger_path, acts)]


def release_all(
    ledger_path: str | os.PathLike[str],
    proc_root: str = "/proc",
    patience_seconds: float = 0.0,
    acts: Collection[str] | None = None,
) -> list[UndoResult]:
    """Undoes what the ledger has outstanding, and closes its entries. Never raises for one of them.

    `patience_seconds`: how long to wait, after undoing, for a dying agent to unlock the ledger; `acts`: only these.
    """
    return _release(_outstanding(ledger_path, acts), ledger_path, proc_root, patience_seconds)


def keep_releasing(
    ledger_path: str | os.PathLike[str], left: Iterable[UndoResult], limit_seconds: float, every_seconds: float = 1.0
) -> list[UndoResult]:
    """Retries what failed and may yet succeed, such as memory that did not fit on its device. What is left then.

    An act that a later agent has intended anew is that agent's, and left to it.
    """
    rest = [one for one in left if one.outcome is UndoOutcome.FAILED and _is_retryable(one.entry)]
    ends = time.monotonic() + limit_seconds
    while rest and time.monotonic() < ends:
        time.sleep(every_seconds)
        outstanding = ledger.read(ledger_path)
        entries = [one.entry for one in rest if one.entry in outstanding]
        rest = [one for one in _release(entries, ledger_path, "/proc", 0.0) if not one.closed]
    return rest


class BackgroundUndo:
    """Undoes some acts in a thread of its own; their entries stay, as by `undo_all`.

    One run at a time: while the agent only hangs, it may yet go on with what its entries name.
    """

    def __init__(self, ledger_path: Path, clock: Callable[[], int], acts: Collection[str]) -> None:
        self._clock = clock
        self._job = BackgroundJob("undo", lambda: undo_all(ledger_path, acts=acts), failed="undoing")
        self._began_ns: int | None = None

    def start(self) -> None:
        """Begins a run, unless one is under way."""
        if not self._job.running:
            self._began_ns = self._clock()
            self._job.start()

    def start_if_due(self) -> None:
        """As `start`, but not many times a second."""
        if self._began_ns is None or self._clock() - self._began_ns >= AGAIN_NS:
            self.start()

    def wait(self) -> None:
        """Until the present run has ended."""
        self._job.wait()


def _outstanding(ledger_path: str | os.PathLike[str], acts: Collection[str] | None) -> list[LedgerEntry]:
    """In the order of the table, acts that this version does not know last."""
    order = {act: position for position, act in enumerate(UNDO)}
    entries = [entry for entry in ledger.read(ledger_path) if acts is None or entry.act in acts]
    return sorted(entries, key=lambda entry: order.get(entry.act, len(order)))


def _is_retryable(entry: LedgerEntry) -> bool:
    how = UNDO.get(entry.act)
    return how is not None and how.retryable


def _is_slow(entry: LedgerEntry) -> bool:
    how = UNDO.get(entry.act)
    return how is not None and not how.quick


def _release(
    entries: list[LedgerEntry], ledger_path: str | os.PathLike[str], proc_root: str, patience_seconds: float
) -> list[UndoResult]:
    boot = this_boot()  # reading needs neither the lock nor space on the disk: undoing comes first
    results = [undo(entry, boot, proc_root) for entry in entries if not _is_slow(entry)]
    unclosed = _close(results, ledger_path)
    for entry in entries:
        if _is_slow(entry):  # closed one by one: an act may be done anew while others are undone
            results.append(undo(entry, boot, proc_root))
            unclosed += _close(results[-1:], ledger_path)
    _close(unclosed, ledger_path, patience_seconds)
    return results


def _close(
    results: list[UndoResult], ledger_path: str | os.PathLike[str], patience_seconds: float = 0.0
) -> list[UndoResult]:
    """Those whose entries could not be closed: they are looked at again next time, and found running.

    All are closed by one write, or a release would take time with the square of what is outstanding.
    """
    closed = [one for one in results if one.closed]
    if closed:
        try:
            with closing(_open(ledger_path, patience_seconds)) as opened:
                opened.done_if_same(one.entry for one in closed)
        except WardenError:
            return closed
    return []


def _open(ledger_path: str | os.PathLike[str], patience_seconds: float) -> ledger.Ledger:
    ends = time.monotonic() + patience_seconds
    while True:
        try:
            return ledger.Ledger(ledger_path)
        except WardenError:
            if time.monotonic() >= ends:
                raise
            time.sleep(_LOCK_AGAIN_SECONDS)
