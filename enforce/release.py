# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undo what the ledger says was done. Used by `gpuwarden release`, by the next start and by the guardian.

Touches only what is in the ledger, and only if it is that very process or place. One that cannot be undone does not
keep the others waiting. How each act is undone is in `enforce.undoing`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

from agent.errors import GoneError, WardenError
from agent.procfs import Procfs
from enforce import ledger
from enforce.entries import Entry
from enforce.outcome import Outcome
from enforce.undoing import MAY_YET_SUCCEED, UNDO

_AGAIN_SECONDS = 0.02
_NO_PROCESS = (errno.EINVAL, errno.ENOENT)  # pidfd_open, older and newer kernels: the number is a thread's now
_SLOW = frozenset({"lock", "swap", "mps"})  # all others are undone at once, before anything waits for the disk
_ORDER = {act: position for position, act in enumerate(UNDO)}


@dataclass(frozen=True, slots=True)
class Released:
    """One entry of the ledger, and what was done about it."""

    entry: Entry
    outcome: Outcome
    error: str | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self.outcome.closed


def release_all(
    ledger_path: str | os.PathLike[str],
    proc_root: str = "/proc",
    patience_seconds: float = 0.0,
    acts: Collection[str] = UNDO,
) -> list[Released]:
    """Undo everything that the ledger has outstanding, and close its entries. Never raises for one of them.

    `patience_seconds`: how long to wait, when all is undone, for a dying agent to let go of the ledger.
    `acts`: only these.
    """
    entries = [entry for entry in ledger.read(ledger_path) if acts is UNDO or entry.act in acts]
    return _release(entries, ledger_path, proc_root, patience_seconds)


def keep_releasing(
    ledger_path: str | os.PathLike[str], left: Iterable[Released], limit_seconds: float, every_seconds: float = 1.0
) -> list[Released]:
    """Tries again what failed and may yet succeed, such as memory that did not fit on its device. What is left then.

    An act that a later agent has intended anew is that agent's, and left to it.
    """
    rest = [one for one in left if one.outcome is Outcome.FAILED and one.entry.act in MAY_YET_SUCCEED]
    ends = time.monotonic() + limit_seconds
    while rest and time.monotonic() < ends:
        time.sleep(every_seconds)
        outstanding = ledger.read(ledger_path)
        entries = [one.entry for one in rest if one.entry in outstanding]
        rest = [one for one in _release(entries, ledger_path, "/proc", 0.0) if not one.closed]
    return rest


def _release(
    entries: list[Entry], ledger_path: str | os.PathLike[str], proc_root: str, patience_seconds: float
) -> list[Released]:
    boot = ledger.this_boot()  # reading needs neither the lock nor space on the disk: undoing comes first
    entries.sort(key=lambda entry: _ORDER.get(entry.act, len(_ORDER)))
    quick = [undo(entry, boot, proc_root) for entry in entries if entry.act not in _SLOW]
    released, unclosed = [*quick], _close(quick, ledger_path)
    for entry in entries:
        if entry.act in _SLOW:  # its act may be done anew while others are undone
            released.append(undo(entry, boot, proc_root))
            unclosed += _close(released[-1:], ledger_path)
    _close(unclosed, ledger_path, patience_seconds)
    return released


def _close(
    released: list[Released], ledger_path: str | os.PathLike[str], patience_seconds: float = 0.0
) -> list[Released]:
    """Those that could not be closed: they are looked at again next time, and found running."""
    left = [one for one in released if one.closed]
    if left:
        with suppress(WardenError), closing(_open(ledger_path, patience_seconds)) as book:
            outstanding = book.outstanding()
            while left:
                if left[0].entry in outstanding:  # or whoever did it anew has another entry, and keeps it
                    book.done(left[0].entry.id)
                del left[0]
    return left


def undo_all(
    ledger_path: str | os.PathLike[str], proc_root: str = "/proc", without: Collection[str] = ()
) -> list[Released]:
    """Undo what the ledger has outstanding but for some acts; entries stay: whoever wrote them may yet go on."""
    entries = [entry for entry in ledger.read(ledger_path) if entry.act not in without]  # needs no lock and no space
    boot = ledger.this_boot()
    entries.sort(key=lambda entry: _ORDER.get(entry.act, len(_ORDER)))
    return [undo(entry, boot, proc_root) for entry in entries]


def undo(entry: Entry, boot: str, proc_root: str = "/proc") -> Released:
    """Undo one act; its entry in the ledger is not touched. Never raises."""
    if entry.boot and boot and entry.boot != boot:
        return Released(entry, Outcome.GONE)
    act = UNDO.get(entry.act)
    if act is None:
        return Released(entry, Outcome.FAILED, f"this version does not know the act {entry.act!r}: use the newer one")
    try:
        return Released(entry, act(entry, Procfs(proc_root)))
    except (GoneError, ProcessLookupError):
        return Released(entry, Outcome.GONE)
    except (OSError, WardenError) as error:
        if entry.process is not None and isinstance(error, OSError) and error.errno in _NO_PROCESS:
            return Released(entry, Outcome.GONE)
        return Released(entry, Outcome.FAILED, str(error))


def _open(ledger_path: str | os.PathLike[str], patience_seconds: float) -> ledger.Ledger:
    ends = time.monotonic() + patience_seconds
    while True:
        try:
            return ledger.Ledger(ledger_path)
        except WardenError:
            if time.monotonic() >= ends:
                raise
            time.sleep(_AGAIN_SECONDS)
