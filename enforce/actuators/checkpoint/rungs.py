# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rungs `lock` and `swap`: each GPU process of the container in turn, through the driver's checkpoint calls.

`lock`: the container's CUDA calls wait inside the driver until they are unlocked (cuCheckpointProcessLock). Its
processes run on otherwise, unlike with `freeze`: they answer their health checks, and their device memory stays.

`swap`: its device memory goes to the host, and the device is free for others (cuCheckpoint…). The host memory is
charged to the process: where its cgroups or the host have no room the kernel would kill it, so that is an obstacle.
Going back needs room on the device; until then it stays saved. How much it has there is in the ledger before it is
saved, noted once it is locked and can allocate no more, as it is never restored without room: the driver would not
restore it any more, even when there is room again.

A process that another program has locked is refused before anything is written or done. One that the driver cannot lock
or save (an MPS client, memory shared with other processes) is remembered, so that the ladder goes on to the next rung.
A process has to run to take part: `pace` stops it for moments, which is waited for; a frozen one is an obstacle, unless
the rung `freeze` froze it: that is undone before another step is taken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from agent.core.errors import GoneError, SetupError
from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint.driver import AnswerKind, CheckpointState, HelperAnswer
from enforce.actuators.checkpoint.helper import (
    CheckpointError,
    DriverLibrary,
    about_to_act,
    acted,
    ask,
    needs_option,
    unanswered,
)
from enforce.actuators.checkpoint.transitions import reason_not_running
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger, LedgerError
from enforce.model import Subject

ACTS = ("lock", "swap")
_NOTHING_TO_DO = (AnswerKind.GONE, AnswerKind.NO_CUDA)


@dataclass(slots=True)
class Checkpoints:
    """Shared by the two rungs. `ledger` says which locks are ours."""

    ledger: Ledger | None  # None: nothing of it is to be applied
    library: DriverLibrary
    procfs: Procfs = field(default_factory=Procfs)
    wall_ns: Callable[[], int] = time.time_ns
    _refused: dict[ProcessId, str] = field(default_factory=dict)
    _mine: set[ProcessId] = field(default_factory=set)  # if they are locked, it is by us

    def obstacle(self, subject: Subject) -> str | None:
        """Why none of it can be done; also that the ledger cannot be read. Reads files only."""
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
        try:
            if frozen is None or self._is_frozen_by_us(subject.container.key):
                return None
        except LedgerError as error:
            return str(error)
        return f"process {frozen.tgid}: its cgroup is frozen"

    def intents(self, act: str, subject: Subject) -> list[LedgerEntry]:
        """An entry for each process that uses CUDA. CheckpointError when another program has locked one."""
        library = self.library.path()
        ours = self._in_ledger()
        entries = []
        for process in subject.processes:
            found = ask("held" if act == "swap" else "state", process, library)
            if found.kind in _NOTHING_TO_DO:
                continue
            if found.kind is not AnswerKind.DONE:
                raise CheckpointError(f"process {process.tgid}: {found.error or found.kind}")
            if found.after is not CheckpointState.RUNNING and process not in ours:
                state = found.after.name if found.after else "?"
                raise CheckpointError(f"process {process.tgid} is {state} already, by another program: left alone")
            self._about_to_act(process, found.after)
            entry = LedgerEntry.of(act, process, subject.container.key, self.wall_ns(), library)
            held = None if found.held is None else tuple(sorted(found.held.items()))
            if found.after is CheckpointState.CHECKPOINTED:
                held = ours[process].device_bytes  # NVML lists it no more
            entries.append(replace(entry, device_bytes=held))
        return entries

    def apply(self, command: str, subject: Subject) -> None:
        """All processes that the ledger has, or CheckpointError at the first that cannot.

        One without an entry used no CUDA a moment ago, and may by now: nothing would undo what is done to it.
        """
        library, entries = self.library.path(), self._in_ledger()
        for process in subject.processes:
            if process not in entries:
                continue
            options = ("--ours",) if process in self._mine else ()
            answer = ask(command, process, library, *options, *needs_option(entries[process]))
            self._note(process, answer)
            if answer.kind is AnswerKind.DONE or answer.kind in _NOTHING_TO_DO:
                continue
            raise CheckpointError(f"process {process.tgid}: {answer.error or answer.kind}")

    def note_held(self, subject: Subject) -> None:
        """What the processes hold now, into the entries of `swap` that they have. CheckpointError, LedgerError."""
        known = self._in_ledger()
        for entry in self.intents("swap", subject):
            before = known.get(entry.process) if entry.process is not None else None
            if self.ledger is not None and before is not None and before.device_bytes != entry.device_bytes:
                self.ledger.intend(entry)

    def _note(self, process: ProcessId, answer: HelperAnswer) -> None:
        if answer.kind is AnswerKind.DONE:
            self._mine.add(process)
        if answer.kind is AnswerKind.TIMEOUT:
            unanswered(process)
        else:
            acted(process, foreign=answer.kind is AnswerKind.FOREIGN and process not in self._mine)
        if answer.kind is AnswerKind.UNSUPPORTED:
            for one in self._ended(self._refused):
                self._refused.pop(one, None)
            self._refused[process] = "it is an MPS client or shares memory with other processes: the driver refuses"

    def _ended(self, known: Iterable[ProcessId]) -> list[ProcessId]:
        """To be taken out in place: the containers' threads share what is known."""
        return [one for one in tuple(known) if not self.procfs.is_alive(one)]

    def _refusal_of(self, process: ProcessId) -> str | None:
        why = self._refused.get(process)
        return f"process {process.tgid}: {why}" if why else None

    def _is_frozen(self, process: ProcessId) -> bool:
        try:
            return "frozen" in (reason_not_running(process.tgid, self.procfs) or "")
        except (GoneError, SetupError):
            return False

    def _is_frozen_by_us(self, container: ContainerKey) -> bool:
        """By the ledger, which has a freeze from before it is in force until after it is undone."""
        entries = self.ledger.outstanding() if self.ledger is not None else ()
        return any(entry.act == "freeze" and entry.container == container for entry in entries)

    def _about_to_act(self, process: ProcessId, found: CheckpointState | None) -> None:
        self._mine.difference_update(self._ended(self._mine))
        if found is CheckpointState.RUNNING:
            self._mine.discard(process)
        else:
            self._mine.add(process)
        about_to_act(process)

    def _in_ledger(self) -> dict[ProcessId, LedgerEntry]:
        """The processes that are ours, each with its entry of `swap`, or else of `lock`."""
        entries = self.ledger.outstanding() if self.ledger is not None else ()
        entries = sorted((entry for entry in entries if entry.act in ACTS), key=lambda entry: ACTS.index(entry.act))
        return {entry.process: entry for entry in entries if entry.process is not None}


_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # v2, v1


def room_bytes(
    cgroup: str, cgroups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int | None:
    """Host memory that a container can still take: the least that the host and its cgroups leave. None: unknown."""
    rooms = [_host_bytes(meminfo), *(_left_bytes(folder) for folder in _folders(cgroup, cgroups))]
    return min((room for room in rooms if room is not None), default=None)


def _host_bytes(meminfo: Path) -> int | None:
    found = _AVAILABLE.search(_text(meminfo))
    return int(found[1]) * 1024 if found else None


def _folders(cgroup: str, cgroups: Path) -> Iterator[Path]:
    path = PurePosixPath(cgroup.lstrip("/"))
    for below in (path, *path.parents):
        yield cgroups / below
        yield cgroups / "memory" / below


def _left_bytes(folder: Path) -> int | None:
    """The limit less what is used. Cache that was not used lately does not count: it gives way."""
    for limit_file, usage_file in _FILES:
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdecimal() and usage.isdecimal():
            cache = _CACHE.search(_text(folder / "memory.stat"))
            return max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0))
    return None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""


_SPARE_RATIO = 0.1  # of the room, left for what else happens meanwhile
_GIB = 1 << 30


def _unknown(_key: ContainerKey) -> int | None:
    return None


@dataclass(slots=True)
class Swap:
    """A rung. Undone by `enforce.actuators.checkpoint.helper.release_process`.

    `device_bytes`: how much a container has on its devices; None: unknown, then the room is not checked.
    """

    checkpoints: Checkpoints
    device_bytes: Callable[[ContainerKey], int | None] = _unknown
    host_bytes: Callable[[str], int | None] = room_bytes  # by the container's cgroup
    name: str = "swap"

    def obstacle(self, subject: Subject) -> str | None:
        """As for `lock`, and a host without room."""
        return self.checkpoints.obstacle(subject) or self._no_room(subject)

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """One for each process; CheckpointError when another program has locked one."""
        return self.checkpoints.intents(self.name, subject)

    def apply(self, subject: Subject) -> None:
        """Locks and saves; takes as long as the memory takes to the host. CheckpointError, LedgerError."""
        self.checkpoints.apply("lock", subject)
        self.checkpoints.note_held(subject)
        self.checkpoints.apply("swap-out", subject)

    def _no_room(self, subject: Subject) -> str | None:
        wanted = self.device_bytes(subject.container.key)
        room = None if wanted is None else self.host_bytes(subject.container.cgroup)
        if wanted is None or room is None or wanted <= room * (1 - _SPARE_RATIO):
            return None
        return f"host memory has {room / _GIB:.1f} GiB left for the {wanted / _GIB:.1f} GiB that it holds on the device"


@dataclass(slots=True)
class Lock:
    """A rung. Undone by `enforce.actuators.checkpoint.helper.release_process`."""

    checkpoints: Checkpoints
    name: str = "lock"

    def obstacle(self, subject: Subject) -> str | None:
        """No driver with the calls, an MPS client, a frozen process."""
        return self.checkpoints.obstacle(subject)

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """One for each process; CheckpointError when another program has locked one."""
        return self.checkpoints.intents(self.name, subject)

    def apply(self, subject: Subject) -> None:
        """Waits for what is queued to drain, at most for `helper.LOCK_LIMIT_MS` each; CheckpointError."""
        self.checkpoints.apply("lock", subject)
