# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which copy of libcuda a path is.

A uprobe sits on the file's real inode, so two paths to one file must count as one. On overlayfs the paths look
different: every mount has a device number of its own. What identifies the file is the layer that it really lies in,
and that is in the mount's options. Where the layers cannot be seen from here, two paths may be taken for two files;
the probes then notice that they fire twice and drop one (bpf/maps.bpf.h, is_duplicate).

The options are believed only where root of the node made the mounts. Whoever may mount in a user namespace of its own
chooses their text: it could pass a file off as another container's, which then nobody would probe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from agent import foreign
from agent.errors import GoneError
from agent.model import ProcessId
from agent.procfs import Procfs
from agent.proctext import unescaped


@dataclass(frozen=True, slots=True)
class FileId:
    """Device and inode of the file that a uprobe would really sit on."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/PID/mountinfo: where, from which directory of the file system, its type, its options."""

    point: str
    root: str
    kind: str
    options: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One directory of an overlay mount, as the node sees it, and where in it a file would lie."""

    folder: str
    inside: str


@contextmanager
def opened(proc: Procfs, process: ProcessId, path: str) -> Iterator[tuple[int, os.stat_result, FileId]]:
    """The file that `path` is to the process: a descriptor, its facts, and which file it is. GoneError, SetupError."""
    descriptor = proc.open_inside(process, path)
    try:
        facts = os.fstat(descriptor)
        layers = [] if proc.mounts_by_itself(process) else layer_paths(parse_mounts(proc.mounts(process.tgid)), path)
        yield descriptor, facts, real_file(facts, layers)
    finally:
        os.close(descriptor)


def parse_mounts(text: str) -> list[Mount]:
    """The lines of a mountinfo file (proc(5)); malformed ones are skipped."""
    mounts = []
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields, more = head.split(), tail.split()
        if separator and len(fields) >= 5 and len(more) >= 3:
            mounts.append(Mount(unescaped(fields[4]), unescaped(fields[3]), more[0], more[2]))
    return mounts


def layer_paths(mounts: list[Mount], path: str) -> list[Layer]:
    """Where a file of an overlay mount may really lie, topmost layer first; empty when `path` is on none."""
    under = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount.point)]
    if not under:
        return []
    mount = max(enumerate(under), key=lambda item: (len(item[1].point), item[0]))[1]
    if mount.kind != "overlay":
        return []
    inside = os.path.normpath(f"{mount.root}/{PurePosixPath(path).relative_to(mount.point)}").lstrip("/")
    return [Layer(folder, inside) for folder in _layers(mount.options) if folder.startswith("/")]


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
        return foreign.look(folder, layer.inside, links=False)
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
