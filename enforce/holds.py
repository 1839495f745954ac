# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is held now: every hold is in the ledger before it is in force, and leaves it after it is released."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agent.clock import wall_ns
from agent.errors import GoneError, WardenError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.ledger import Ledger
from enforce.model import FULL, Actuator, Level, Target
from enforce.planner import Change

_log = logging.getLogger(__name__)
_STOPPED = "TD"  # frozen by a v1 freezer it shows as D, and may be stopped as well


class Holds:
    """Applies changes. A hold whose ledger entry cannot be written is not made."""

    def __init__(self, actuator: Actuator, ledger: Ledger, proc: Procfs) -> None:
        self._actuator, self._ledger, self._proc = actuator, ledger, proc
        self._entries: dict[Target, str] = {}
        self._targets: set[Target] = set()
        self._leaving: dict[str, ProcessId] = {}  # released, but perhaps still stopped until the guardian gets to it
        self.refused = 0

    def in_force(self) -> dict[Target, Level]:
        """Read back from where it is in force, so that a foreign writer does not go unnoticed."""
        found = {target: self._actuator.current(target) for target in self._targets}
        return {target: level for target, level in found.items() if level is not None}

    def perform(self, changes: Iterable[Change]) -> None:
        """Writes the changes, one by one; one that fails is counted and hinders no other."""
        self._close_left()
        for change in changes:
            try:
                self._move(change.target, change.after)
            except (OSError, WardenError) as error:
                self.refused += 1
                _log.warning("%s not held: %s", change.target.process, error)

    def release_all(self) -> None:
        """Nobody is held any more. Entries stay open until the processes are seen running or `enforce.release` ran."""
        self.perform([Change(target, FULL, FULL) for target in list(self._targets)])

    def _move(self, target: Target, level: Level) -> None:
        if level.slows:  # again at each change: whoever released everything meanwhile has closed the entry
            entry = Entry.of("pace", target.process, target.container, wall_ns())
            self._ledger.intend(entry)
            self._entries[target] = entry.id
        self._actuator.apply(target, level)
        if level == FULL:
            self._targets.discard(target)
        else:
            self._targets.add(target)
        if not level.slows and target in self._entries:
            self._leaving[self._entries.pop(target)] = target.process

    def _close_left(self) -> None:
        for entry, process in list(self._leaving.items()):
            try:
                if self._proc.is_alive(process) and self._proc.stat(process.tgid).state in _STOPPED:
                    continue
            except GoneError:
                pass
            if entry not in self._entries.values():
                try:
                    self._ledger.done(entry)
                except WardenError as error:  # it stays outstanding: undoing it again does no harm
                    self.refused += 1
                    _log.warning("%s", error)
                    return
            del self._leaving[entry]
