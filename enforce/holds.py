# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is held now: every hold is in the ledger before it is in force, and leaves it after it is released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from agent.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.errors import GoneError, SetupError, WardenError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.entries import Entry
from enforce.ledger import Ledger
from enforce.model import FULL, Actuator, Level, Target
from enforce.planner import Change

_log = logging.getLogger(__name__)
_AFFIRM_NS = 5 * NS_PER_SECOND
_STOPPED = "TD"  # frozen by a v1 freezer it shows as D, and may be stopped as well


class Holds:
    """Applies changes. A hold whose ledger entry cannot be written is not made."""

    def __init__(
        self, actuator: Actuator, ledger: Ledger, proc: Procfs, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self._actuator, self._ledger, self._proc, self._clock = actuator, ledger, proc, clock
        self._entries: dict[Target, str] = {}
        self._intended: dict[str, Entry] = {}  # what the ledger is to have outstanding
        self._affirmed_ns = clock()
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
        self._affirm()
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
            entry = self._intended.get(entry.id, entry)
            self._ledger.intend(entry)
            self._entries[target] = entry.id
            self._intended[entry.id] = entry
        self._actuator.apply(target, level)
        if level == FULL:
            self._targets.discard(target)
        else:
            self._targets.add(target)
        if not level.slows and target in self._entries:
            entry_id = self._entries.pop(target)
            self._leaving[entry_id] = target.process
            if entry_id not in self._entries.values():
                self._intended.pop(entry_id, None)

    def _affirm(self) -> None:
        """The kernel's rules stay in force whoever released everything meanwhile, and closed our entries."""
        if self._clock() - self._affirmed_ns < _AFFIRM_NS:
            return
        self._affirmed_ns = self._clock()
        for entry in self._intended.values():
            try:
                self._ledger.intend(entry)
            except WardenError as error:
                self.refused += 1
                _log.warning("%s", error)
                return

    def _close_left(self) -> None:
        for entry, process in list(self._leaving.items()):
            try:
                if self._proc.is_alive(process) and self._proc.stat(process.tgid).state in _STOPPED:
                    continue
            except GoneError:
                pass
            except SetupError:  # it cannot be read now
                continue
            if entry not in self._entries.values():
                try:
                    self._ledger.done(entry)
                except WardenError as error:  # it stays outstanding: undoing it again does no harm
                    self.refused += 1
                    _log.warning("%s", error)
                    return
            del self._leaving[entry]
