# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Snapshots on file, one line of JSON each: written while watching, played back later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agent.errors import SetupError
from agent.model import Snapshot
from agent.schema import SchemaError, dumps, loads

Source = Callable[[], Snapshot]


class EndOfRecording(Exception):  # noqa: N818  an event, not an error
    """Everything has been played."""


@contextmanager
def recorded(source: Source, path: Path) -> Iterator[Source]:
    """The same source, each snapshot of which is also appended to the file at once."""
    try:
        file = path.open("a", encoding="ascii", buffering=1)
    except OSError as error:
        raise SetupError(f"cannot record to {path} ({error.strerror}): choose a file that can be written") from error

    def next_snapshot() -> Snapshot:
        snapshot = source()
        file.write(dumps(snapshot) + "\n")
        return snapshot

    with file:
        yield next_snapshot


class Recording:
    """A file of snapshots, any of which can be had; only where each begins is kept in memory."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._lines: list[tuple[int, int]] = []  # number and offset of each line that is not blank
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                self._lines.append((number, offset))
            offset += len(line)
        if not self._lines:
            raise SetupError(f"{path} holds no snapshot: name a file made with --record")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Snapshot:
        number, offset = self._lines[index]
        self._file.seek(offset)
        try:
            return loads(self._file.readline().decode(errors="replace"))
        except SchemaError as error:
            raise SetupError(f"{self._path}, line {number}: {error}") from error


@contextmanager
def opened(path: Path) -> Iterator[Recording]:
    """The recording in a file. SetupError where there is none."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SetupError(f"cannot replay {path} ({error.strerror}): name a file made with --record") from error
    with file:
        yield Recording(file, path)


def played(recording: Recording) -> Source:
    """Its snapshots, one per call, then EndOfRecording."""
    indices = iter(range(len(recording)))

    def next_snapshot() -> Snapshot:
        for index in indices:
            return recording[index]
        raise EndOfRecording

    return next_snapshot
