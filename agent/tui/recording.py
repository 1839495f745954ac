# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Snapshots on file, one line of JSON each: written while watching, played back later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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


@contextmanager
def replayed(path: Path) -> Iterator[Source]:
    """The snapshots of a recording, one per call, then EndOfRecording."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SetupError(f"cannot replay {path} ({error.strerror}): name a file made with --record") from error
    with file:
        snapshots = _snapshots(file, path)
        yield lambda: next(snapshots)


def _snapshots(file: TextIO, path: Path) -> Iterator[Snapshot]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield loads(line)
        except SchemaError as error:
            raise SetupError(f"{path}, line {number}: {error}") from error
    raise EndOfRecording
