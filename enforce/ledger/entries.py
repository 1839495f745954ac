# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The entries of the ledger, its lines, and what undoing an entry can come to. Text in, values out, no I/O.

One act is one line when it is intended and one when it is undone. A line that is cut short is no JSON object, so a torn
write can never be taken for another line; a line that cannot be read counts as damage, never as an undoing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.model import ContainerKey, ProcessId

MAX_LINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One act on a process, or on a container as a whole.

    `boot` distinguishes it from a process of the same pid and start time before a restart.
    """

    id: str
    act: str  # a key of enforce.actuators.undo.UNDO: "pace", "freeze", …
    process: ProcessId | None  # None: the act is on the place as a whole
    container: ContainerKey
    wall_ns: int
    boot: str = ""  # "": unknown; set by the ledger
    place: str = ""  # what undoing needs to find it: a cgroup's directory, an MPS pipe directory, …; "" for none
    device_bytes: tuple[tuple[str, int], ...] | None = None  # a process's, by device UUID, before it is saved

    @classmethod
    def of(cls, act: str, process: ProcessId, container: ContainerKey, wall_ns: int, place: str = "") -> LedgerEntry:
        """An act on a process. Its id is always the same, so intending it twice is intending it once."""
        entry_id = f"{act}:{process.tgid}:{process.start_ticks}"
        return cls(entry_id, act, process, container, wall_ns, place=place)

    @classmethod
    def at(cls, act: str, place: str, container: ContainerKey, wall_ns: int) -> LedgerEntry:
        """An act on a place that holds a whole container, such as its cgroup."""
        return cls(f"{act}:{place}", act, None, container, wall_ns, place=place)


@dataclass(slots=True)
class Replay:
    """The outstanding entries of a ledger's lines. `dead`: lines that a rewrite would leave out."""

    outstanding: dict[str, LedgerEntry] = field(default_factory=dict)
    lines: int = 0
    damaged: int = 0

    @property
    def dead(self) -> int:
        return self.lines - len(self.outstanding)

    def add(self, lines: Iterable[bytes]) -> None:
        """The next lines, in the order in which they were written."""
        for line in lines:
            if line:
                self.lines += 1
                self._add(line)

    def _add(self, line: bytes) -> None:
        record = _record(line)
        entry = _entry(record)
        if entry is not None:
            self.outstanding[entry.id] = entry
        elif record.get("do") == "done" and isinstance(record.get("id"), str):
            self.outstanding.pop(str(record["id"]), None)
        else:
            self.damaged += 1


def intend_line(entry: LedgerEntry) -> bytes:
    """The line before an act is done."""
    record: dict[str, object] = {
        "do": "intend",
        "id": entry.id,
        "act": entry.act,
        "container": entry.container,
        "wall_ns": entry.wall_ns,
        "boot": entry.boot,
    }
    if entry.process is not None:
        record |= {"tgid": entry.process.tgid, "start_ticks": entry.process.start_ticks}
    if entry.device_bytes is not None:
        record["device_bytes"] = dict(entry.device_bytes)
    if entry.place:
        record["place"] = entry.place
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def done_line(entry_id: str) -> bytes:
    """The line after an act was undone."""
    return json.dumps({"do": "done", "id": entry_id}, separators=(",", ":")).encode() + b"\n"


def _record(line: bytes) -> dict[str, object]:
    if len(line) > MAX_LINE_BYTES:
        return {}
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # ValueError covers bad UTF-8 and integers too long to read
        return {}
    return record if isinstance(record, dict) else {}


def _entry(record: dict[str, object]) -> LedgerEntry | None:
    entry_id, act, boot, place = record.get("id"), record.get("act"), record.get("boot", ""), record.get("place", "")
    container, wall_ns = record.get("container"), _natural(record.get("wall_ns"))
    if record.get("do") != "intend" or not isinstance(entry_id, str) or not isinstance(act, str):
        return None
    if not isinstance(container, str) or not isinstance(boot, str) or not isinstance(place, str) or wall_ns is None:
        return None
    process = _process(record)
    if not _is_path(place) or (process is None and ("tgid" in record or not place)):
        return None
    held = _device_bytes(record.get("device_bytes"))
    return LedgerEntry(entry_id, act, process, ContainerKey(container), wall_ns, boot, place, held)


def _is_path(place: str) -> bool:
    """Whether a call to the kernel takes it: else undoing it would raise what is caught for no entry."""
    try:
        return b"\0" not in place.encode("utf-8", "surrogateescape")  # as os.fsencode does, without I/O
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _device_bytes(value: object) -> tuple[tuple[str, int], ...] | None:
    held = {str(uuid): _natural(used) for uuid, used in value.items()} if isinstance(value, dict) else None
    if held is None or None in held.values():
        return None
    return tuple(sorted((uuid, used) for uuid, used in held.items() if used is not None))


def _process(record: dict[str, object]) -> ProcessId | None:
    tgid, start_ticks = _natural(record.get("tgid"), 31), _natural(record.get("start_ticks"))
    return ProcessId(tgid, start_ticks) if tgid and start_ticks is not None else None


def _natural(value: object, bits: int = 63) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits else None


class UndoOutcome(StrEnum):
    """What undoing one entry of the ledger came to."""

    RESUMED = "resumed"
    RUNNING = "running"  # it was not stopped; there was nothing to undo
    GONE = "gone"  # the process or place has ended, or its name is another's now
    RESTORED = "restored"  # a limit is again what it was before
    FOREIGN = "foreign"  # another program has changed it since: left alone
    TRACED = "traced"  # a debugger holds it: left alone, the entry stays
    FAILED = "failed"  # the entry stays

    @property
    def closed(self) -> bool:
        """Whether nothing is left to undo."""
        return self not in (UndoOutcome.TRACED, UndoOutcome.FAILED)
