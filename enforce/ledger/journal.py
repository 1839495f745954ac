# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A file of lines that several processes append to, each line whole and on disk before `append` returns.

Everything is done under a lock on the file itself, which is waited for only briefly: its holder may be stopped, as
processes are here. Any writer may replace the file by a shorter one; the others notice when they next lock it. Raises
OSError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MAX_BYTES = 64 << 20
_LOCK_SECONDS = 0.05
_RETRY_SECONDS = 0.001
_TORN = b" torn\n"  # no line ends so
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Journal:
    """One writer's handle. Not for several threads at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._directory = os.path.dirname(path) or "."
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._fd = _open(path, os.O_CREAT)
        self._read_bytes = 0
        self._again = False
        self.lost = False  # the file was removed or cut by another program: what it held has to be written again
        _sync_directory(self._directory)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes meanwhile. BlockingIOError when another one holds the lock for too long."""
        self._lock()
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def new_lines(self) -> tuple[bool, list[bytes]]:
        """Whole lines since the last call; True when they are all there are, from the beginning again."""
        size = os.fstat(self._fd).st_size
        if size < self._read_bytes:
            self._read_bytes, self._again, self.lost = 0, True, True
        if size - self._read_bytes > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)
        new = os.pread(self._fd, size - self._read_bytes, self._read_bytes)
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        again, self._again = self._again, False
        return again, whole.split(b"\n")

    def append(self, line: bytes) -> None:
        """All of the line or nothing. Call `new_lines` before.

        A line before it that a crash cut short is made unreadable: one that lacks nothing but its end would count from
        now on, though meanwhile it did not.
        """
        before = os.fstat(self._fd).st_size
        torn = before > self._read_bytes
        try:
            _write_all(self._fd, _TORN + line if torn else line)
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, before)
            raise

    def replace(self, lines: bytes) -> None:
        """Replaces all lines by these. The old file is whole until the new one has its name."""
        temporary = f"{self.path}.new"
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        fd = _open(temporary, os.O_CREAT | os.O_EXCL)
        try:
            _lock_briefly(fd)
            _write_all(fd, lines)
            os.fsync(fd)
            os.rename(temporary, self.path)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self._take(fd)
        _sync_directory(self._directory)

    def close(self) -> None:
        """Closes the file; the lines stay."""
        os.close(self._fd)

    def _lock(self) -> None:
        while True:
            _lock_briefly(self._fd)
            there = _identity(self.path)
            if there == _identity(self._fd):
                return
            self._take(_open(self.path, os.O_CREAT))
            self.lost = self.lost or there is None

    def _take(self, fd: int) -> None:
        os.close(self._fd)  # and with it its lock
        self._fd, self._read_bytes, self._again = fd, 0, True


def _open(path: str, flags: int) -> int:
    """A regular file of this user that no other user can read or write."""
    fd = os.open(path, _FLAGS | flags, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a regular file of this user", path)
    os.fchmod(fd, 0o600)
    return fd


def _identity(file: str | int) -> tuple[int, int] | None:
    try:
        status = os.stat(file, follow_symlinks=False) if isinstance(file, str) else os.fstat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _lock_briefly(fd: int, clock: Callable[[], float] = time.monotonic) -> None:
    deadline = clock() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
