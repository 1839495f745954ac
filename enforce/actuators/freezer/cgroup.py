# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The cgroup that holds an offline container, whether it may be frozen, freezing it, and how a freeze is undone.

A container's cgroup holds all of it and nothing else, so that freezing it stops no other process: the cgroups below it
are checked, and the processes in there, whether they use a GPU or not. Facts decide, not what a process is called; what
is in doubt is refused. A cgroup of ours, v1 or v2, carries a mark (an extended attribute): one that another program
froze has none, nor has a cgroup that was made anew under the same name. So a cgroup with a mark may be thawed, and no
other. Source: the kernel's cgroup-v2.rst and freezer-subsystem.rst.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Self

from agent.containers.identity import identify, owns_all_below
from agent.core.errors import GoneError, SetupError, WardenError
from agent.core.model import Container, ContainerKey
from agent.node import preflight
from agent.node.cgroups import folders, hierarchies, parse_mounts
from agent.node.procfs import Procfs
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.model import Subject

MARKING: Final = "CAP_SYS_ADMIN"  # without it a mark can be neither set nor read
_MARK = "trusted.gpuwarden"
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)
_SELF_FREEZING = "freezer.self_freezing"
_MAX_BYTES = 4096
_COMM_CHARACTERS = 15


class Mark(Enum):
    """The values of the mark."""

    OURS = b"ours"
    UNDOING = b"undoing"  # a cgroup that is thawed under this mark was thawed from the ledger


@dataclass(frozen=True, slots=True)
class FreezerCgroup:
    """A cgroup's directory in the hierarchy that can freeze it. A later cgroup of that name has another inode."""

    version: int
    inode: int
    folder: str

    @classmethod
    def of(cls, version: int, folder: str) -> FreezerCgroup:
        """As it is now. Raises OSError."""
        return cls(version, os.stat(folder).st_ino, folder)

    @classmethod
    def parse(cls, text: str) -> FreezerCgroup:
        """The inverse of `str`."""
        head, _, rest = text.partition(":")
        inode, _, folder = rest.partition(":")
        if head not in ("v1", "v2") or not inode.isdecimal() or not folder.startswith("/"):
            raise WardenError(f"{text[:80]!r} is no cgroup's place: the ledger was written by another version")
        return cls(int(head[1:]), int(inode), folder)

    def __str__(self) -> str:
        return f"v{self.version}:{self.inode}:{self.folder}"


class Cgroup:
    """An open cgroup: it can be thawed when there are no file descriptors left. Methods raise GoneError or OSError."""

    def __init__(self, place: FreezerCgroup) -> None:
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
        """Whether it is itself requested to be frozen."""
        return self._read(self._control if self._v2 else self._state) == "1"

    def is_frozen(self) -> bool:
        """Whether all of it is frozen, itself or with its parent."""
        if self._v2:
            return "frozen 1" in self._read(self._state).split("\n")
        return self._read(self._control) == "FROZEN"

    def is_touched(self) -> bool:
        """Whether it or a parent is frozen, or about to be."""
        return self.is_asked() or (self.is_frozen() if self._v2 else self._read(self._control) != "THAWED")

    def freeze(self) -> None:
        """Requests it; it takes a moment."""
        self._write(b"1" if self._v2 else b"FROZEN")

    def thaw(self) -> None:
        """Lets it run."""
        self._write(b"0" if self._v2 else b"THAWED")

    def claim(self) -> bool:
        """Marks it as ours before it is frozen. False: a freeze is being undone, and that goes first."""
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
        """Removes the mark: it is not ours any more."""
        with self._translated():
            try:
                os.removexattr(self._folder, _MARK)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise

    def _read(self, file: int) -> str:
        with self._translated():
            return os.pread(file, _MAX_BYTES, 0).decode(errors="replace").strip()

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


def thaw(entry: LedgerEntry, _procfs: Procfs) -> UndoOutcome:
    """Undoes a freeze: thaws the very cgroup that the ledger names. Raises GoneError, OSError or WardenError."""
    with Cgroup(FreezerCgroup.parse(entry.place)) as cgroup:
        if not preflight.holds(MARKING):
            raise SetupError(f"whether we froze it cannot be read without {MARKING}: run as root")
        return let_run(cgroup)


def let_run(cgroup: Cgroup) -> UndoOutcome:
    """Thaws a cgroup of ours. The mark goes last: until then another process may finish this. GoneError or OSError."""
    if cgroup.marked() is None:
        return UndoOutcome.RUNNING  # never frozen, or undone already; if it is frozen now, that was not us
    cgroup.mark(Mark.UNDOING)
    asked = cgroup.is_asked()
    cgroup.thaw()
    if cgroup.marked() is Mark.UNDOING:  # else another process has finished this, and it is frozen anew
        cgroup.unmark()
    return UndoOutcome.RESUMED if asked else UndoOutcome.RUNNING


MAX_FOLDERS: Final = 1024
# Programs of the node that others depend on, as /proc shows them, cut at 15: frozen, the runtimes would leave all other
# containers without one, the last three the GPU's other users. In a container such a name is the tenant's own choice.
_RUNTIMES: Final = frozenset(
    {"containerd", "containerd-shim", "dockerd", "kubelet", "crio", "conmon", "podman", "runc", "crun"}
)
_GPU_SERVICES: Final = frozenset({"nvidia-persiste", "nv-fabricmanage", "nvidia-cuda-mps"})


class NotFreezableError(WardenError):
    """The container cannot be frozen here and now; the message says why."""


class TooManyCgroupsError(NotFreezableError):
    """The look ended early: more cgroups lie there than it was to read."""


def freezable(
    subject: Subject, proc: Procfs, spared: Collection[int] = (), most_folders: int = MAX_FOLDERS
) -> FreezerCgroup:
    """The cgroup to freeze. `spared`: tgids that must not be in there. Raises NotFreezableError.

    Of MAX_FOLDERS cgroups the first are read where all that lie below are the container's; where they may not be, it is
    refused. With fewer `most_folders` a longer look is refused with TooManyCgroupsError.
    """
    container = subject.container
    if container.cgroup.strip("/") == "":
        raise NotFreezableError("it has no cgroup of its own")
    living = {process.tgid for process in subject.processes if proc.is_alive(process)}
    if not living:
        raise NotFreezableError("none of its processes runs")
    freezers = [each for each in hierarchies(parse_mounts(proc.mounts(os.getpid()))) if each.has_freezer]
    for version, root in ((freezer.version, freezer.point) for freezer in freezers):
        folder = Path(root + container.cgroup)
        if not (folder / ("cgroup.freeze" if version == 2 else "freezer.state")).exists():
            continue
        if all(_lies_in(container.cgroup, version, tgid, proc) for tgid in living):
            _check(container.key, set(_members(folder, Path(root), container, most_folders)), proc, spared)
            return FreezerCgroup.of(version, str(folder))
    raise NotFreezableError(f"no freezer has all of its processes in {container.cgroup}")


def _lies_in(cgroup: str, version: int, tgid: int, proc: Procfs) -> bool:
    """Whether the process is in that cgroup or below, in the hierarchy that freezes."""
    try:
        lines = proc.cgroup(tgid).split("\n")
    except GoneError:
        return True
    except SetupError:
        return False
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (controllers == "" if version == 2 else "freezer" in controllers.split(",")) and path:
            return f"{path}/".startswith(f"{cgroup}/")
    return False


def _members(folder: Path, root: Path, container: Container, most_folders: int) -> Iterator[int]:
    """The tgids in the cgroup and below."""
    trusted = owns_all_below(container)
    for count, below in enumerate(folders(folder, most_folders + 1)):
        if count >= most_folders:
            if trusted and most_folders >= MAX_FOLDERS:
                return  # a container cannot escape by making many
            raise TooManyCgroupsError(f"more than {most_folders} cgroups lie in {folder}")
        try:
            tgids = [int(word) for word in Path(below, "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            continue
        except OSError as error:
            raise NotFreezableError(f"cgroup {below} cannot be read ({error.strerror})") from error
        inside = None if trusted or not tgids else identify("/" + os.path.relpath(below, root))
        if inside is not None and inside.cgroup != container.cgroup:
            raise NotFreezableError(f"its cgroup also holds {inside.name}")
        yield from tgids


def _check(key: ContainerKey, tgids: set[int], proc: Procfs, spared: Collection[int]) -> None:
    if os.getpid() in tgids:
        raise NotFreezableError("the agent runs in its cgroup")
    if not tgids.isdisjoint({0, 1}):
        raise NotFreezableError("its cgroup holds PID 1 or processes that the agent cannot see")
    if not tgids.isdisjoint(spared):
        raise NotFreezableError(f"its cgroup also holds processes that are not of {key}")
    for tgid in tgids:
        try:
            needed = _needed_by_others(tgid, proc)
        except GoneError:
            continue
        except SetupError as error:
            raise NotFreezableError(str(error)) from error
        if needed is not None:
            raise NotFreezableError(f"its cgroup holds {needed}, which others depend on")


def _needed_by_others(tgid: int, proc: Procfs) -> str | None:
    """Its name, if it is a program of the node's own by more than its name, which any process may choose."""
    comm = proc.stat(tgid).comm
    if comm in _GPU_SERVICES:
        return comm if proc.is_of_node(tgid) else None
    if comm not in _RUNTIMES or not proc.is_of_node(tgid):
        return None
    program = proc.executable(tgid).rpartition("/")[2]
    return comm if program[:_COMM_CHARACTERS] == comm else None
