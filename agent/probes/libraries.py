# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which file a path leads to, and word of a probed file that is written over.

A uprobe sits on the file's real inode, so two paths to one file must count as one. On overlayfs the paths look
different: every mount has a device number of its own. What identifies the file is the layer that it really lies in,
which is in the mount's options. Where the layers cannot be seen from here, two paths may be taken for two files; the
probes then notice that they fire twice and drop one (bpf/maps.bpf.h, is_duplicate).

The options are trusted only where root of the node made the mounts. A process that mounts in a user namespace of its
own chooses their text: it could pass a file off as another container's, which would then go unprobed.

A uprobe stays at its offset whatever is written there: a program that maps the new content would meet a breakpoint in
the middle of an instruction. So the probes have to go before the writer is done, not at the next look: inotify(7).
Where the kernel grants no watch, the next look has to do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from agent.core.errors import GoneError, ProbeError
from agent.core.model import ProcessId
from agent.node import container_files
from agent.node.cgroups import Mount, parse_mounts
from agent.node.proc_parse import MappedFile, unescaped
from agent.node.procfs import Procfs

_MOST_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class FileId:
    """Device and inode of the file that a uprobe would really sit on."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One directory of an overlay mount, as the node sees it, and where in it a file would lie."""

    folder: str
    inside: str


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file: its descriptor, the path that messages show, which file it is, and which content it has."""

    descriptor: int
    path: str
    file: FileId
    version: tuple[int, int]  # size and time of the last change

    @classmethod
    def of(cls, descriptor: int, path: str, layers: list[Layer] | None = None) -> OpenFile:
        """`layers`: of the overlay mount that the path is on."""
        for _ in range(_MOST_LOOKS):
            facts = os.fstat(descriptor)
            file = real_file(facts, layers or [])
            if not layers or file != FileId(facts.st_dev, facts.st_ino):
                break  # else it may have been written to between the two looks
        return cls(descriptor, path, file, (facts.st_size, facts.st_mtime_ns))


@contextmanager
def opened(proc: Procfs, process: ProcessId, path: str) -> Iterator[OpenFile]:
    """The file that `path` is to the process. GoneError, SetupError."""
    descriptor = proc.open_inside(process, path)
    try:
        layers = [] if proc.mounts_by_itself(process) else layer_paths(parse_mounts(proc.mounts(process.tgid)), path)
        yield OpenFile.of(descriptor, path, layers)
    finally:
        os.close(descriptor)


@contextmanager
def opened_mapping(proc: Procfs, process: ProcessId, mapped: MappedFile) -> Iterator[OpenFile]:
    """The file that the process has mapped there, whatever its path leads to. GoneError, SetupError."""
    descriptor = proc.open_span(process, mapped)
    try:
        hidden = mapped.deleted or proc.mounts_by_itself(process)
        layers = [] if hidden else layer_paths(parse_mounts(proc.mounts(process.tgid)), mapped.path)
        yield OpenFile.of(descriptor, mapped.path, layers)
    finally:
        os.close(descriptor)


def layer_paths(mounts: list[Mount], path: str) -> list[Layer]:
    """Where a file of an overlay mount may really lie, topmost layer first; empty when `path` is on none."""
    under = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount.point)]
    if not under:
        return []
    mount = max(enumerate(under), key=lambda item: (len(item[1].point), item[0]))[1]
    if mount.kind != "overlay":
        return []
    inside = os.path.normpath(f"{mount.root}/{PurePosixPath(path).relative_to(mount.point)}").lstrip("/")
    return [Layer(folder, inside) for folder in _layers(mount.super_options) if folder.startswith("/")]


def real_file(facts: os.stat_result, layers: list[Layer]) -> FileId:
    """The file behind an open one: its own numbers, or those of the first layer that has it."""
    for layer in layers:
        try:
            real = _look(layer)
        except (OSError, GoneError):
            continue
        if real.st_size == facts.st_size and real.st_mtime_ns == facts.st_mtime_ns:
            return FileId(real.st_dev, real.st_ino)
    return FileId(facts.st_dev, facts.st_ino)


def _look(layer: Layer) -> os.stat_result:
    """Below the folder every name is the container's: no link of it is followed."""
    folder = os.open(layer.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return container_files.look(folder, layer.inside, links=False)
    finally:
        os.close(folder)


def _layers(options: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for option in re.split(r"(?<!\\),", unescaped(options)):
        name, _, value = option.partition("=")
        if name in ("lowerdir", "upperdir", "lowerdir+"):
            parts = [part.replace("\\:", ":") for part in re.split(r"(?<!\\):", value) if part]
            found.setdefault(name.rstrip("+"), []).extend(parts)
    return [*found.get("upperdir", []), *found.get("lowerdir", [])]


class FileNumbers:
    """A number for each probed file: by it the kernel side knows whose call is whose, and where a denied one goes on.

    Invariant: no two files have one number at the same time. A file that comes back while it is among the last that
    were released has the number that it had, as processes may remember it as the owner of a function.
    """

    def __init__(self, most: int, remembered: int = 4096) -> None:
        """Numbers are 1 … `most`."""
        self._most, self._remembered = most, remembered
        self.clashes = 0  # that were seen where numbers are used: a fault of ours
        self._next = 1
        self._in_force: dict[FileId, int] = {}
        self._released: dict[FileId, int] = {}  # the first is the one that was released first
        self._taken: set[int] = set()  # of both

    @property
    def is_free(self) -> bool:
        """Whether another file can have one."""
        return len(self._in_force) < self._most

    def take(self, file: FileId) -> int:
        """The file's number, in force until `release`. ProbeError when there is none."""
        if file in self._in_force:
            return self._in_force[file]
        number = self._released.pop(file, None)
        if number is None:
            number = self._new()
        self._in_force[file] = number
        return number

    def release(self, file: FileId) -> None:
        """Nothing in the kernel has the file's number any more."""
        number = self._in_force.pop(file, None)
        if number is None:
            return
        self._released[file] = number
        if len(self._released) > self._remembered:
            self._forget_first()

    def _new(self) -> int:
        if not self.is_free:
            raise ProbeError(f"all of {self._most} numbers are in force")
        if len(self._taken) == self._most:
            self._forget_first()
        while self._next in self._taken:
            self._next = self._next % self._most + 1
        number = self._next
        self._next = number % self._most + 1  # the longest ago is used again last
        self._taken.add(number)
        return number

    def _forget_first(self) -> None:
        self._taken.discard(self._released.pop(next(iter(self._released))))


_log = logging.getLogger(__name__)
_EVENT: Final = struct.Struct("=iIII")  # watch, mask, cookie, length of the name: none, for a file
_MODIFY: Final = 0x2
_READ_BYTES: Final = 64 << 10


class FileChanges:
    """Watches files for writes; `fileno` is readable when some were written to."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._descriptor < 0:
            _log.warning("no inotify: %s; a probed file that is written over is noticed late", _reason())

    def fileno(self) -> int | None:
        """None where there is no inotify."""
        return self._descriptor if self._descriptor >= 0 else None

    def watch(self, descriptor: int, path: str) -> int | None:
        """The number of the watch on an open file, which messages call `path`; None where there is none."""
        if self._descriptor < 0:
            return None
        watch = int(self._libc.inotify_add_watch(self._descriptor, b"/proc/self/fd/%d" % descriptor, _MODIFY))
        if watch < 0:
            _log.warning("%s is not watched: %s; if it is written over, that is noticed late", path, _reason())
        return watch if watch >= 0 else None

    def forget(self, watch: int) -> None:
        """Removes a watch. Its file may be gone, and the watch with it."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def take(self) -> set[int]:
        """The watches whose files were written to since the last call. Does not wait."""
        if self._descriptor < 0:
            return set()
        try:
            events = os.read(self._descriptor, _READ_BYTES)  # once: a file that is written all the time has no end
        except BlockingIOError:
            return set()
        return {watch for watch, mask, _, _ in _EVENT.iter_unpack(events) if mask & _MODIFY}

    def close(self) -> None:
        """Removes all watches."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
