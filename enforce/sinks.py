# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where lines go: a file that never grows beyond its bound, standard output, or nowhere. Raises OSError.

A file has one predecessor, `.1`, so a log takes at most twice its bound on the disk. One that is moved or removed by
somebody else is begun anew.
"""

from __future__ import annotations

import os
from typing import Protocol

_STDOUT = 1
MOST_FILE_BYTES = 16 << 20
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Sink(Protocol):
    """Takes whole lines."""

    def write(self, line: bytes) -> None:
        """All of the line."""
        ...

    def close(self) -> None:
        """No more lines."""
        ...


def sink_of(destination: str, most_bytes: int) -> Sink:
    """A path, "-" for standard output, "" for nowhere."""
    if not destination:
        return Nowhere()
    return StandardOutput() if destination == "-" else RotatedFile(destination, most_bytes)


class Nowhere:
    """Takes everything, keeps nothing."""

    def write(self, line: bytes) -> None:
        """Forgets it."""

    def close(self) -> None:
        """Nothing to do."""


class StandardOutput:
    """Not through sys.stdout: a thread that hangs in it would take the interpreter's exit with it."""

    def write(self, line: bytes) -> None:
        """The line, at once."""
        _write_all(_STDOUT, line)

    def close(self) -> None:
        """Standard output is not ours to close."""


class RotatedFile:
    """Opened at the first line: a path that cannot be written costs lines, not the agent."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._fd: int | None = None

    def write(self, line: bytes) -> None:
        """The line, after a rotation where it would not fit."""
        fd = self._current()
        if os.fstat(fd).st_size + len(line) > self._most_bytes:
            os.replace(self._path, f"{self._path}.1")
            fd = self._reopened()
        _write_all(fd, line)

    def close(self) -> None:
        """Closes the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _current(self) -> int:
        if self._fd is None:
            return self._reopened()
        try:
            there, here = os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)
        except FileNotFoundError:
            return self._reopened()
        return self._fd if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) else self._reopened()

    def _reopened(self) -> int:
        self.close()
        self._fd = os.open(self._path, _FLAGS, 0o640)
        return self._fd


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
