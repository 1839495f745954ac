# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Undoes `mps`: how limits that were set on an MPS daemon are written into the ledger, and put back as they were.

One ledger entry is what was set on one daemon at once: each limit with its value before and ours. Only a limit that
still has our value is put back; a value that another writer set since stays. A daemon that ended took its limits with
it; but while another process serves the same pipe, that one may be the daemon, and the one that ended a false one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace

from agent.core.errors import GoneError
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.mps.daemons import daemon_candidates
from enforce.actuators.mps.model import Daemon, MpsControl, MpsError, MpsSetting, Scope
from enforce.actuators.mps.protocol2 import reads_as
from enforce.actuators.mps.protocol3 import connect
from enforce.ledger.entries import LedgerEntry, UndoOutcome

_log = logging.getLogger(__name__)
Pipe = tuple[int, int]  # its device and inode


@dataclass(frozen=True, slots=True)
class LimitChange:
    """One limit: what it was ("" none), what we set, and what to set so that it is as before."""

    setting: MpsSetting
    before: str
    ours: str
    back: str

    def is_ours(self, now: str) -> bool:
        """Whether that is what we set, as the daemon shows it."""
        return reads_as(self.setting, now, self.ours)

    def is_undone(self, now: str) -> bool:
        """Whether it is as before."""
        return now == self.before or reads_as(self.setting, now, self.back)


def to_place(changes: tuple[LimitChange, ...], pipe: Pipe | None = None) -> str:
    """For a ledger entry."""
    rows = [_row(change) for change in changes]
    return json.dumps({"pipe": pipe, "changes": rows} if pipe else rows, separators=(",", ":"))


def from_place(place: str) -> tuple[tuple[LimitChange, ...], Pipe | None]:
    """MpsError when it is not what `to_place` wrote."""
    try:
        found = json.loads(place)
        pipe, rows = (found["pipe"], found["changes"]) if isinstance(found, dict) else (None, found)
        return tuple(_change(*row) for row in rows), _pipe(*pipe) if pipe else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MpsError("an entry of the ledger about MPS limits cannot be read: check them by hand") from error


def restore(entry: LedgerEntry, proc: Procfs) -> UndoOutcome:
    """Puts back the limits of one entry. MpsError when the daemon does not answer, GoneError when it has ended."""
    if entry.process is None:
        raise MpsError("an entry of the ledger about MPS limits names no daemon: check them by hand")
    changes, pipe = from_place(entry.place)
    control = connect(_daemon(entry.process, pipe, proc))
    found = {put_back(control, change) for change in changes}
    return next((one for one in (UndoOutcome.FOREIGN, UndoOutcome.RESTORED) if one in found), UndoOutcome.RUNNING)


def _daemon(process: ProcessId, pipe: Pipe | None, proc: Procfs) -> Daemon:
    """That process, or the one that serves the pipe through which the limits were set."""
    candidates = daemon_candidates(proc).daemons
    daemon = next((one for one in candidates if one.process == process), None)
    if daemon is not None:
        return daemon
    if proc.is_alive(process):
        raise MpsError(f"the MPS control daemon {process.tgid} is not recognised any more: check its limits")
    daemon = next((one for one in candidates if pipe is not None and one.pipe == pipe), None)
    if daemon is None:
        raise GoneError(f"the MPS control daemon {process.tgid} has ended")
    if daemon.contested:
        raise MpsError(daemon.contested_error)
    return daemon


def put_back(control: MpsControl, change: LimitChange) -> UndoOutcome:
    """One limit; of a default also where servers that started meanwhile took it over."""
    outcome = _put_back(control, change)
    setting = change.setting
    if control.protocol == 2 and not setting.scope.server and setting.what != "priority":
        for scope in control.scopes():
            inherited = replace(change, setting=replace(setting, scope=scope))
            if scope.server and change.is_ours(control.get(inherited.setting)):
                _put_back(control, inherited)
    return outcome


def _put_back(control: MpsControl, change: LimitChange) -> UndoOutcome:
    if not _is_there(control, change.setting.scope):
        return UndoOutcome.GONE
    now = control.get(change.setting)
    if change.is_undone(now):
        return UndoOutcome.RUNNING
    if not change.is_ours(now):
        what, daemon = change.setting.what, control.daemon.process.tgid
        _log.warning("MPS daemon %d: another writer has set %s to %s since: left alone", daemon, what, now or "none")
        return UndoOutcome.FOREIGN
    control.put(change.setting, change.back)
    return UndoOutcome.RESTORED


def take_back(control: MpsControl, change: LimitChange) -> None:
    """Undoes what this process has just tried to set, whatever it reads as. MpsError: the ledger still has it."""
    if _is_there(control, change.setting.scope) and not change.is_undone(control.get(change.setting)):
        control.put(change.setting, change.back)


def _is_there(control: MpsControl, scope: Scope) -> bool:
    return not scope.server or scope.server in {server.name for server in control.servers()}


def _pipe(device: int, inode: int) -> Pipe:
    if not (isinstance(device, int) and isinstance(inode, int)):
        raise TypeError(device)
    return device, inode


def _row(change: LimitChange) -> list[object]:
    setting = change.setting
    where = [setting.scope.server, setting.scope.space, setting.device]
    return [setting.what, *where, change.before, change.ours, change.back]


# Seven parameters: the columns of a row.
def _change(what: str, server: str, space: str, device: int | None, before: str, ours: str, back: str) -> LimitChange:
    if not all(isinstance(text, str) for text in (what, server, space, before, ours, back)):
        raise TypeError(what)
    if what not in ("percentage", "memory", "priority") or not (device is None or isinstance(device, int)):
        raise ValueError(what)
    return LimitChange(MpsSetting(what, Scope(server, space), device), before, ours, back)
