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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from agent.errors import GoneError, WardenError

MARKING: Final = "CAP_SYS_ADMIN"  # who lacks it can neither set a mark nor see one
_MARK = "trusted.gpuwarden"
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
_SELF_FREEZING = "freezer.self_freezing"
_LONGEST_BYTES = 4096


class Mark(Enum):
    """What the mark says."""

    OURS = b"ours"
    UNDOING = b"undoing"  # whoever finds it thawed under this mark knows that it was no stranger


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
    """An open cgroup: whoever has run out of file descriptors can still thaw it. Methods raise GoneError or OSError."""

    def __init__(self, place: Place) -> None:
        """GoneError when that very cgroup is not there any more."""
        self._v2, self.folder = place.version == 2, place.folder
        with ExitStack() as stack, self._translated():
            self._folder = _open(place.folder, os.O_RDONLY | os.O_DIRECTORY, stack)
            if os.fstat(self._folder).st_ino != place.inode:
                raise GoneError(f"cgroup {place.folder} is another one now")
            control, state = ("cgroup.freeze", "cgroup.events") if self._v2 else ("freezer.state", _SELF_FREEZING)
            self._control = _open(control, os.O_RDWR, stack, self._folder)
            self._state = _open(state, os.O_RDONLY, stack, self._folder)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Leaves it as it is."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_asked(self) -> bool:
        """Whether it itself is told to be frozen."""
        return self._read(self._control if self._v2 else self._state) == "1"

    def is_frozen(self) -> bool:
        """Whether all of it stands still, be it for its own sake or its parent's."""
        if self._v2:
            return "frozen 1" in self._read(self._state).split("\n")
        return self._read(self._control) == "FROZEN"

    def is_touched(self) -> bool:
        """Whether it or what it lies in is frozen, or about to be."""
        return self.is_asked() or (self.is_frozen() if self._v2 else self._read(self._control) != "THAWED")

    def freeze(self) -> None:
        """Asks for it; it takes a moment."""
        self._write(b"1" if self._v2 else b"FROZEN")

    def thaw(self) -> None:
        """Lets it run."""
        self._write(b"0" if self._v2 else b"THAWED")

    def claim(self) -> bool:
        """Says that whatever freezes it from now on is us. False: it is being undone, and that goes first."""
        with self._translated():
            try:
                os.setxattr(self._folder, _MARK, Mark.OURS.value, os.XATTR_CREATE)
            except FileExistsError:
                return self.marked() is Mark.OURS
        return True

    def mark(self, mark: Mark) -> None:
        """Writes it over whatever mark there is. OURS is for `claim`, which does not."""
        with self._translated():
            os.setxattr(self._folder, _MARK, mark.value)

    def marked(self) -> Mark | None:
        """None: if it is frozen, that was not us."""
        with self._translated():
            try:
                return Mark.OURS if os.getxattr(self._folder, _MARK) == Mark.OURS.value else Mark.UNDOING
            except OSError as error:
                if error.errno == errno.ENODATA:
                    return None
                raise

    def unmark(self) -> None:
        """Says that we have nothing to do with it any more."""
        with self._translated():
            try:
                os.removexattr(self._folder, _MARK)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise

    def _read(self, file: int) -> str:
        with self._translated():
            return os.pread(file, _LONGEST_BYTES, 0).decode(errors="replace").strip()

    def _write(self, value: bytes) -> None:
        with self._translated():
            os.pwrite(self._control, value, 0)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                raise GoneError(f"cgroup {self.folder} is no longer there") from error
            raise


def _open(name: str, flags: int, stack: ExitStack, folder: int | None = None) -> int:
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    stack.callback(os.close, file)
    return file
