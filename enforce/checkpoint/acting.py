# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the rungs `lock` and `swap` have in common: each GPU process of the container, one after the other.

A process that somebody else has locked is refused before anything is written or done. One that the driver cannot lock
or save (an MPS client, memory shared with other processes) is remembered, so that the ladder goes on to the next rung.
A process has to run to take part: `pace` stops it for moments, which is waited for; a frozen one is an obstacle, unless
it is the rung `freeze` that holds it: that is undone before another step is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agent.errors import GoneError, SetupError
from agent.model import ContainerKey, ProcessId
from agent.procfs import Procfs
from enforce.checkpoint.answer import Answer, Kind
from enforce.checkpoint.driver import State
from enforce.checkpoint.helper import ask
from enforce.checkpoint.library import DriverLibrary
from enforce.checkpoint.running import what_holds
from enforce.checkpoint.undoing import CheckpointError, about_to_act, acted
from enforce.entries import Entry
from enforce.ledger import Ledger
from enforce.model import Subject

ACTS = ("lock", "swap")
_NOTHING_TO_DO = (Kind.GONE, Kind.NO_CUDA)


@dataclass(slots=True)
class Checkpoints:
    """Shared by the two rungs. `ledger` says which locks are ours."""

    ledger: Ledger | None  # None: nothing of it is to be applied
    library: DriverLibrary
    procfs: Procfs = field(default_factory=Procfs)
    wall_ns: Callable[[], int] = time.time_ns
    _refused: dict[ProcessId, str] = field(default_factory=dict)
    _mine: set[ProcessId] = field(default_factory=set)  # whose lock, if there is one, is ours

    def obstacle(self, subject: Subject) -> str | None:
        """Why none of it can be done; reads files, asks nobody."""
        if not subject.processes:
            return "none of its processes uses a GPU now"
        try:
            self.library.path()
        except SetupError as error:
            return str(error)
        refused = (self._refusal_of(process) for process in subject.processes)
        reason = next((reason for reason in refused if reason), None)
        if reason is not None:
            return reason
        frozen = next((process for process in subject.processes if self._is_frozen(process)), None)
        if frozen is None or self._is_frozen_by_us(subject.container.key):
            return None
        return f"process {frozen.tgid}: its cgroup is frozen"

    def intents(self, act: str, subject: Subject) -> list[Entry]:
        """An entry for each process that uses CUDA. CheckpointError when somebody else has locked one."""
        library = self.library.path()
        ours = self._in_ledger()
        entries = []
        for process in subject.processes:
            found = ask("state", process, library)
            if found.kind in _NOTHING_TO_DO:
                continue
            if found.kind is not Kind.DONE:
                raise CheckpointError(f"process {process.tgid}: {found.error or found.kind}")
            if found.after is not State.RUNNING and process not in ours:
                state = found.after.name if found.after else "?"
                raise CheckpointError(f"process {process.tgid} is {state} already, by somebody else: left alone")
            self._take(process, found.after)
            entries.append(Entry.of(act, process, subject.container.key, self.wall_ns(), library))
        return entries

    def apply(self, command: str, subject: Subject) -> None:
        """All processes, or CheckpointError at the first that cannot."""
        library = self.library.path()
        for process in subject.processes:
            answer = ask(command, process, library, ours=process in self._mine)
            self._note(process, answer)
            if answer.kind is Kind.DONE or answer.kind in _NOTHING_TO_DO:
                continue
            raise CheckpointError(f"process {process.tgid}: {answer.error or answer.kind}")

    def _note(self, process: ProcessId, answer: Answer) -> None:
        if answer.kind is Kind.DONE:
            self._mine.add(process)
        if answer.kind is not Kind.TIMEOUT:
            acted(process, foreign=answer.kind is Kind.FOREIGN and process not in self._mine)
        if answer.kind is Kind.UNSUPPORTED:
            self._refused = {one: why for one, why in self._refused.items() if self.procfs.is_alive(one)}
            self._refused[process] = "it is an MPS client or shares memory with other processes: the driver refuses"

    def _refusal_of(self, process: ProcessId) -> str | None:
        why = self._refused.get(process)
        return f"process {process.tgid}: {why}" if why else None

    def _is_frozen(self, process: ProcessId) -> bool:
        try:
            return "frozen" in (what_holds(process.tgid, self.procfs) or "")
        except (GoneError, SetupError):
            return False

    def _is_frozen_by_us(self, container: ContainerKey) -> bool:
        """By the ledger, which has a freeze from before it comes until after it is gone."""
        entries = self.ledger.outstanding() if self.ledger is not None else ()
        return any(entry.act == "freeze" and entry.container == container for entry in entries)

    def _take(self, process: ProcessId, found: State | None) -> None:
        self._mine = {one for one in self._mine if self.procfs.is_alive(one)}
        if found is State.RUNNING:
            self._mine.discard(process)
        else:
            self._mine.add(process)
        about_to_act(process)

    def _in_ledger(self) -> frozenset[ProcessId]:
        entries = self.ledger.outstanding() if self.ledger is not None else ()
        return frozenset(entry.process for entry in entries if entry.process is not None and entry.act in ACTS)
