# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The ledger: every act is on disk before it happens, so that a process that survives can undo it.

Several processes write it (the agent, the guardian, `gpuwarden release`); each first takes in what the others wrote.
What is outstanding may be too much after a crash, never too little. A process that cannot write an entry must not act.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from agent.core.errors import WardenError
from agent.node.procfs import this_boot
from enforce.ledger.entries import MAX_LINE_BYTES, LedgerEntry, Replay, done_line, intend_line
from enforce.ledger.journal import MAX_BYTES, Journal

MAX_DEAD_LINES = 1000


class LedgerError(WardenError):
    """The ledger cannot be written, so nothing may be done that would have to be undone; or it cannot be trusted."""


class Ledger:
    """One process's view of the file. Safe to share between threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.compactions_failed = 0
        self._boot = this_boot()
        self._mutex = threading.Lock()
        self._replay = Replay()
        self._compact_above = MAX_DEAD_LINES
        with self._translated("opened"):
            self._journal = Journal(self.path)
        with self._locked("read"):
            self._compact_if_due()

    def intend(self, entry: LedgerEntry) -> None:
        """Puts an act on disk, before it is done. Raises LedgerError: then it must not be done."""
        entry = replace(entry, boot=entry.boot or self._boot)
        line = intend_line(entry)
        if len(line) > MAX_LINE_BYTES:
            raise LedgerError(f"the ledger's entry {entry.id[:80]} is too long; give the container a shorter key")
        with self._locked("written"):
            if self._replay.outstanding.get(entry.id) != entry:
                self._append(line)
            self._compact_if_due()

    def intend_new(self, entry: LedgerEntry) -> bool:
        """As `intend`, but for an act that is outstanding already, which stays as it is: False."""
        with self._locked("written"):
            if entry.id in self._replay.outstanding:
                return False
            self._append(intend_line(entry))
            return True

    def done(self, *entry_ids: str) -> None:
        """Closes the entries of undone acts, with one write. Raises LedgerError: they stay; undoing again is safe."""
        with self._locked("written"):
            self._close(entry_id for entry_id in entry_ids if entry_id in self._replay.outstanding)

    def done_if_same(self, entries: Iterable[LedgerEntry]) -> None:
        """As `done`, of those that are still outstanding as given: an act that was done anew has another entry."""
        with self._locked("written"):
            self._close(entry.id for entry in entries if self._replay.outstanding.get(entry.id) == entry)

    def outstanding(self) -> list[LedgerEntry]:
        """What is intended and not undone, by any process, the oldest first."""
        with self._locked("read"):
            return list(self._replay.outstanding.values())

    def damaged(self) -> int:
        """How many lines could not be parsed: cut short by a crash, or not ours."""
        return self._replay.damaged

    def close(self) -> None:
        """Closes the file; entries stay."""
        self._journal.close()

    @contextmanager
    def _locked(self, doing: str) -> Iterator[None]:
        with self._mutex, self._translated(doing), self._journal.locked():
            self._catch_up()
            yield

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            cure = "another gpuwarden holds its lock: end the one that hangs"
            raise LedgerError(f"the ledger {self.path} cannot be {doing}; {cure}") from error
        except OSError as error:
            cure = "free space, or check the path, its owner and that it is no link; until then nothing is slowed"
            raise LedgerError(f"the ledger {self.path} cannot be {doing} ({error.strerror}); {cure}") from error

    def _catch_up(self) -> None:
        """Takes in what was written since the last time."""
        again, lines = self._journal.new_lines()
        known = self._replay.outstanding
        if again:
            self._replay = Replay()
        self._replay.add(lines)
        if self._journal.lost:
            # Removed or cut by another program: acts of ours may be in force that no other process could undo.
            self._replay.outstanding = {**known, **self._replay.outstanding}
            self._append(b"".join(intend_line(entry) for entry in self._replay.outstanding.values()))
            self._journal.lost = False

    def _append(self, lines: bytes) -> None:
        self._journal.append(lines)
        self._replay.add(self._journal.new_lines()[1])

    def _close(self, entry_ids: Iterable[str]) -> None:
        if lines := b"".join(done_line(entry_id) for entry_id in dict.fromkeys(entry_ids)):
            self._append(lines)
        self._compact_if_due()

    def _compact_if_due(self) -> None:
        if self._replay.dead <= self._compact_above:
            return
        entries = list(self._replay.outstanding.values())
        try:
            self._journal.replace(b"".join(intend_line(entry) for entry in entries))
            self._compact_above = MAX_DEAD_LINES
        except OSError:
            self.compactions_failed += 1
            self._compact_above = self._replay.dead + MAX_DEAD_LINES  # not again at each append
        self._catch_up()


def read(path: str | os.PathLike[str]) -> list[LedgerEntry]:
    """What a ledger has outstanding, without writing to it. An empty list for a file that is no ledger of ours.

    As for every writer, a last line without an end does not count: its write did not return.
    """
    replay = Replay()
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if _distrusted(os.fstat(fd)) is None:
                content = file.read(MAX_BYTES)
                replay.add(content[: content.rfind(b"\n") + 1].split(b"\n"))
    return list(replay.outstanding.values())


def unreadable(path: str | os.PathLike[str]) -> str | None:
    """Why `read` takes nothing from the file, and what to do about it; None: it does, or there is no file."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"cannot be looked at ({error.strerror}): use sudo"
    if (why := _distrusted(facts)) is not None:
        return why
    return None if os.access(path, os.R_OK) else "cannot be read: use sudo"


def _distrusted(facts: os.stat_result) -> str | None:
    """A file that other users wrote, or could have, is not used: undoing its entries would let them act through us."""
    if not stat.S_ISREG(facts.st_mode):
        return "is no ledger but something else: remove it, and see what put it there"
    if facts.st_uid not in (0, os.geteuid()):
        return (
            f"belongs to user {facts.st_uid}: if the agent ran as that user, release as that user too, with the same "
            "capabilities (systemctl stop gpuwarden does); else remove it"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by others: read it, and if all of it is the agent's, chmod go-w it; else remove it"
    return None
