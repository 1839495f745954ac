# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Kernel rules by which a process may be stopped, each with its entry in the ledger for at least as long as the rule.

`LedgeredRules` owns the entries of one act; the caller owns the rules themselves. An entry is on disk before its rule
is written; where the ledger cannot be written, neither is the rule. `gpuwarden release` and the guardian close entries
while the rules stay in force, so every entry is written again now and then. After a rule is removed its process may
stay stopped until the guardian resumes it, so the entry is closed only when the process is seen running or has ended.

`LaunchRules` are those of gate and pace: level changes go to the actuator. What is in force is read back from it, so a
rule that another writer changed is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.core.errors import GoneError, SetupError, WardenError
from agent.core.model import ProcessId
from agent.node.pidfd import Pidfd
from agent.node.procfs import Procfs
from enforce.actuators.launch.levels import LevelChange
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger
from enforce.model import FULL, Actuator, Level, Target

_log = logging.getLogger(__name__)
REAFFIRM_NS: Final = 5 * NS_PER_SECOND
_LEADER_ENDED = "ZX"  # its other threads live
_MAY_BE_STOPPED = "TD"  # a process frozen by a v1 freezer shows D, and may be stopped as well


class LedgeredRules:
    """The rules of one act ("pace", "hold"), one for each process. For one thread."""

    def __init__(self, act: str, ledger: Ledger, proc: Procfs) -> None:
        self._act, self._ledger, self._proc = act, ledger, proc
        self._entries: dict[ProcessId, LedgerEntry] = {}  # the rule is in force, or writing it failed
        self._unwritten: set[ProcessId] = set()  # those of which the last write failed
        self._removed: dict[ProcessId, LedgerEntry] = {}  # the rule is removed, the process may still be stopped
        self._affirmed_ns = 0
        self.failures = 0  # entries that could not be closed or written again

    def put(self, target: Target, write: Callable[[], object]) -> None:
        """The entry, then the rule. Raises what `write` does.

        SetupError, LedgerError: the rule is not written, as nothing could resume the process, or nothing would know.
        """
        process = target.process
        if process not in self._entries:
            self._require_signals(process)
        entry = self._entries.get(process) or LedgerEntry.of(self._act, process, target.container, wall_ns())
        self._ledger.intend(entry)
        self._removed.pop(process, None)
        self._entries[process] = entry  # also if `write` fails: another try does not write another entry
        self._unwritten.add(process)
        write()
        self._unwritten.discard(process)

    def remove(self, process: ProcessId, delete: Callable[[], object]) -> None:
        """The rule now, its entry later, by `maintain`. Raises what `delete` does: then both stay."""
        delete()
        self._unwritten.discard(process)
        entry = self._entries.pop(process, None)
        if entry is not None:
            self._removed[process] = entry

    def _require_signals(self, process: ProcessId) -> None:
        """Stopping a process in the kernel needs no permission, and SIGCONT does."""
        try:
            with Pidfd(process, self._proc) as pidfd:
                reached = pidfd.may_signal()
        except GoneError:
            return
        if not reached:
            raise SetupError(
                f"process {process.tgid} could not be resumed, so it is not stopped: this agent may not signal it. "
                "Run the agent as root with CAP_KILL, and not confined by AppArmor or SELinux"
            )

    def maintain(self, now_ns: int) -> None:
        """Closes and re-affirms what is due. Never raises: what the ledger refuses is counted and tried again."""
        try:
            self._close()
            self._reaffirm(now_ns)
        except WardenError as error:
            self.failures += 1
            _log.warning("%s", error)

    def _close(self) -> None:
        for process in [process for process in self._unwritten if not self._proc.is_alive(process)]:
            self._unwritten.discard(process)
            self._removed[process] = self._entries.pop(process)
        running = [process for process in self._removed if not self._may_be_stopped(process)]
        if running:  # if closing fails they stay outstanding: undoing them again does no harm
            self._ledger.done(*(self._removed[process].id for process in running))
        for process in running:
            del self._removed[process]

    def _reaffirm(self, now_ns: int) -> None:
        if now_ns - self._affirmed_ns < REAFFIRM_NS:
            return
        self._affirmed_ns = now_ns
        for entry in self._entries.values():
            self._ledger.intend(entry)

    def _may_be_stopped(self, process: ProcessId) -> bool:
        try:
            if not self._proc.is_alive(process):
                return False
            state = self._proc.stat(process.tgid).state
            states = self._proc.thread_states(process.tgid) if state in _LEADER_ENDED else {state}
            return not states.isdisjoint(_MAY_BE_STOPPED)
        except GoneError:
            return False
        except SetupError:  # it cannot be read now
            return True


class LaunchRules:
    """Applies level changes. A rule whose ledger entry cannot be written is not written either."""

    def __init__(
        self, actuator: Actuator, ledger: Ledger, proc: Procfs, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self._actuator, self._clock = actuator, clock
        self._ledgered = LedgeredRules("pace", ledger, proc)
        self._targets: set[Target] = set()
        self._refused = 0
        self._logged: dict[ProcessId, str] = {}  # why the last try to change its rule failed
        self._disowned: frozenset[ProcessId] = frozenset()

    def losses(self) -> dict[str, int]:
        """Changes that failed, and entries that the ledger did not take; rules that another writer changed."""
        return {
            "rules:refused": self._refused + self._ledgered.failures,
            "rules:foreign": self._actuator.foreign_writes,
        }

    def in_force(self) -> dict[Target, Level]:
        """The levels of all targets, read back from the actuator."""
        return self._actuator.current(self._targets)

    def perform(self, changes: Iterable[LevelChange]) -> None:
        """Writes the changes, one by one; one that fails is counted and hinders no other.

        Those that slow no process first: should the kernel's map be full, the online processes' rules are in it.
        """
        self._ledgered.maintain(self._clock())
        failed: dict[ProcessId, str] = {}
        for change in sorted(changes, key=lambda change: change.after.slows):
            try:
                self._apply(change.target, change.after)
            except (OSError, WardenError) as error:
                self._refused += 1
                process, reason = change.target.process, str(error)
                failed[process] = reason
                if change.after.slows:
                    self._actuator.disown(process)  # what may not get a rule is not stopped by another one's either
                if self._logged.get(process) != reason:  # it is tried again ten times a second
                    _log.warning("the launch rule of %s is not changed: %s", process, reason)
        self._logged = failed

    def disown(self, processes: frozenset[ProcessId]) -> None:
        """Those that no rule may slow: what they were forked by may be under one. The same ones again cost nothing."""
        for process in processes - self._disowned:
            self._actuator.disown(process)
        self._disowned = processes

    def release_all(self) -> None:
        """Removes every rule. Entries stay open until the processes are seen running, or are undone from the ledger."""
        self.perform([LevelChange(target, FULL, FULL) for target in list(self._targets)])

    def _apply(self, target: Target, level: Level) -> None:
        def write() -> None:
            self._actuator.apply(target, level)

        if level.slows:
            self._ledgered.put(target, write)
        else:  # also an online process's rule, which never stops it
            self._ledgered.remove(target.process, write)
        if level == FULL:
            self._targets.discard(target)
        else:
            self._targets.add(target)
