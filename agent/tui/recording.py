# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Snapshots on file, one line of JSON each: written while watching, played back later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from agent.core.errors import SetupError
from agent.core.model import Snapshot
from agent.core.snapshot_json import SchemaError, dumps, loads

Source = Callable[[], Snapshot]
_log = logging.getLogger("gputop")


class EndOfRecording(Exception):  # noqa: N818  an event, not an error
    """Everything has been played."""


@contextmanager
def recorded(source: Source, path: Path) -> Iterator[Source]:
    """The same source, each snapshot of which is also appended to the file at once, and once only.

    SetupError when not even the first one can be; later on the source goes on without the file, and an error is logged.
    """
    last_ns, going = -1, True  # when the snapshot was taken that was recorded last

    def next_snapshot() -> Snapshot:
        nonlocal last_ns, going
        snapshot = source()
        if going and snapshot.at_ns != last_ns:
            try:
                _append(file, dumps(snapshot))
            except OSError as error:
                if last_ns < 0:
                    raise _unwritable(path, error) from error
                _log.error("recording to %s has ended (%s)", path, error.strerror)
                going = False
            last_ns = snapshot.at_ns
        return snapshot

    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _unwritable(path, error) from error
    with file:
        yield next_snapshot


def _append(file: FileIO, line: str) -> None:
    """A whole line, or nothing."""
    begun, rest = file.seek(0, 2) if file.seekable() else 0, memoryview(f"{line}\n".encode("ascii"))
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with suppress(OSError):
            file.truncate(begun)
        raise


def _unwritable(path: Path, error: OSError) -> SetupError:
    return SetupError(f"cannot record to {path} ({error.strerror}): choose a file that can be written")


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
        if not file.seekable():
            raise SetupError(f"cannot replay {path}, in which there is no going back: unpack it to a file first")
        yield Recording(file, path)


def played(recording: Recording) -> Source:
    """Its snapshots, one per call, then EndOfRecording."""
    indices = iter(range(len(recording)))

    def next_snapshot() -> Snapshot:
        for index in indices:
            return recording[index]
        raise EndOfRecording

    return next_snapshot
