# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One cgroup that can be frozen, v1 or v2, and whether it was us who froze it.

Ours carry a mark (an extended attribute): what somebody else froze has none, nor has a cgroup that was made anew under
the same name. So whoever finds a mark may thaw, and nobody else may. Source: the kernel's cgroup-v2.rst and
freezer-subsystem.rst.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agent.errors import GoneError, WardenError

_MARK = "trusted.gpuwarden"
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
_LONGEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A cgroup's directory in the hierarchy that can freeze it. The inode tells it from a later one of that name."""

    version: int
    inode: int
    folder: str

    @classmethod
    def of(cls, version: int, folder: str) -> Place:
        """As it is now. Raises OSError."""
        return cls(version, os.stat(folder).st_ino, folder)

    @classmethod
    def parse(cls, text: str) -> Place:
        """The opposite of `str`."""
        head, _, rest = text.partition(":")
        inode, _, folder = rest.partition(":")
        if head not in ("v1", "v2") or not inode.isdecimal() or not folder.startswith("/"):
            raise WardenError(f"{text[:80]!r} is no cgroup's place: the ledger was written by another version")
        return cls(int(head[1:]), int(inode), folder)

    def __str__(self) -> str:
        return f"v{self.version}:{self.inode}:{self.folder}"


class Cgroup:
    """An open cgroup. Its methods raise GoneError when it was removed, OSError otherwise."""

    def __init__(self, version: int, folder_fd: int) -> None:
        self._v2, self._folder = version == 2, folder_fd

    def is_asked(self) -> bool:
        """Whether it itself is told to be frozen."""
        return self._read("cgroup.freeze" if self._v2 else "freezer.self_freezing") == "1"

    def is_frozen(self) -> bool:
        """Whether all of it stands still, be it for its own sake or its parent's."""
        if self._v2:
            return "frozen 1" in self._read("cgroup.events").split("\n")
        return self._read("freezer.state") == "FROZEN"

    def is_touched(self) -> bool:
        """Whether it or what it lies in is frozen, or about to be."""
        if self._v2:
            return self.is_asked() or (self.is_frozen() and "populated 1" in self._read("cgroup.events").split("\n"))
        return self._read("freezer.state") != "THAWED"

    def freeze(self) -> None:
        """Asks for it; it takes a moment."""
        self._write("cgroup.freeze" if self._v2 else "freezer.state", "1" if self._v2 else "FROZEN")

    def thaw(self) -> None:
        """Lets it run."""
        self._write("cgroup.freeze" if self._v2 else "freezer.state", "0" if self._v2 else "THAWED")

    def mark(self) -> None:
        """Says that whatever freezes it from now on is us."""
        os.setxattr(self._folder, _MARK, b"1")

    def is_marked(self) -> bool:
        """Whether it is us who may have frozen it."""
        try:
            os.getxattr(self._folder, _MARK)
        except OSError as error:
            if error.errno == errno.ENODATA:
                return False
            raise
        return True

    def unmark(self) -> None:
        """Says that we have nothing to do with it any more."""
        try:
            os.removexattr(self._folder, _MARK)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise

    def _read(self, name: str) -> str:
        with _file(self._folder, name, os.O_RDONLY) as file:
            return os.read(file, _LONGEST_BYTES).decode(errors="replace").strip()

    def _write(self, name: str, value: str) -> None:
        with _file(self._folder, name, os.O_WRONLY) as file:
            os.write(file, value.encode())


@contextmanager
def opened(place: Place) -> Iterator[Cgroup]:
    """GoneError when that very cgroup is not there any more."""
    with _translated(place.folder):
        folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_ino != place.inode:
                raise GoneError(f"cgroup {place.folder} is another one now")
            yield Cgroup(place.version, folder)
        finally:
            os.close(folder)


@contextmanager
def _translated(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise GoneError(f"cgroup {folder} is no longer there") from error
        raise


@contextmanager
def _file(folder: int, name: str, flags: int) -> Iterator[int]:
    file = os.open(name, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)
