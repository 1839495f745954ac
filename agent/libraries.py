# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which copy of libcuda a path is.

A uprobe sits on the file's real inode, so two paths to one file must count as one. On overlayfs the paths look
different: every mount has a device number of its own. What identifies the file is the layer that it really lies in,
and that is in the mount's options. Where the layers cannot be seen from here, two paths may be taken for two files;
the probes then notice that they fire twice and drop one (bpf/maps.bpf.h, is_duplicate).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")


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


def parse_mounts(text: str) -> list[Mount]:
    """The lines of a mountinfo file (proc(5)); malformed ones are skipped."""
    mounts = []
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields, more = head.split(), tail.split()
        if separator and len(fields) >= 5 and len(more) >= 3:
            mounts.append(Mount(_unescape(fields[4]), _unescape(fields[3]), more[0], more[2]))
    return mounts


def layer_paths(mounts: list[Mount], path: str) -> list[str]:
    """Where a file of an overlay mount may really lie, topmost layer first; empty when `path` is on none."""
    under = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount.point)]
    if not under:
        return []
    mount = max(enumerate(under), key=lambda item: (len(item[1].point), item[0]))[1]
    if mount.kind != "overlay":
        return []
    inside = os.path.normpath(f"{mount.root}/{PurePosixPath(path).relative_to(mount.point)}").lstrip("/")
    return [os.path.join(layer, inside) for layer in _layers(mount.options)]


def real_file(facts: os.stat_result, layers: list[str]) -> FileId:
    """The file behind an open one: its own numbers, or those of the first layer that has it."""
    for layer in layers:
        try:
            real = os.stat(layer, follow_symlinks=False)
        except OSError:
            continue
        if real.st_size == facts.st_size and real.st_mtime_ns == facts.st_mtime_ns:
            return FileId(real.st_dev, real.st_ino)
    return FileId(facts.st_dev, facts.st_ino)


def _layers(options: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for option in re.split(r"(?<!\\),", _unescape(options)):
        name, _, value = option.partition("=")
        if name in ("lowerdir", "upperdir", "lowerdir+"):
            parts = [part.replace("\\:", ":") for part in re.split(r"(?<!\\):", value) if part]
            found.setdefault(name.rstrip("+"), []).extend(parts)
    return [*found.get("upperdir", []), *found.get("lowerdir", [])]


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)
