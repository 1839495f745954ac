# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Mounts (the one parser of mountinfo), the cgroup hierarchies among them with their directories, and the node's cgroup
namespace.

Where cgroups are v2, container runtimes give each container a cgroup namespace of its own, and Kubernetes can turn that
off for privileged containers only. Seen from there, the paths of other containers begin with "/.." and lack the part
that they share with the agent's own path, and no hierarchy looks mounted whole: nothing could be frozen. So the agent
joins the node's namespace. Only its view changes: it stays in its cgroup, within its limits. Source: setns(2),
cgroup_namespaces(7).
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from agent.node.proc_parse import unescaped

_log = logging.getLogger(__name__)
_CGROUP_VERSIONS: Final = {"cgroup": 1, "cgroup2": 2}
_CLONE_NEWCGROUP = 0x02000000
_OWN = "/proc/thread-self/ns/cgroup"
_INITIAL = "cgroup:[4026531835]"  # the kernel's own (PROC_CGROUP_INIT_INO)


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `root`: the directory of the file system that is mounted at `point`."""

    point: str
    root: str
    kind: str  # type of the file system
    mount_options: str  # of this mount; comma-separated, as super_options
    super_options: str  # of the file system


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A cgroup hierarchy that is mounted whole."""

    version: int  # 1 or 2
    point: str
    has_freezer: bool  # v2 always has: cgroup.freeze came with Linux 5.2


def parse_mounts(text: str) -> list[Mount]:
    """The lines of a mountinfo file (proc(5)), in the order of mounting; malformed ones are skipped.

    Fields end at a space and nothing else: the kernel escapes spaces, tabs and line feeds, but no other white space.
    """
    mounts = []
    for line in text.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields, more = head.split(" "), tail.split(" ")
        if separator and len(fields) >= 6 and len(more) >= 3:
            mounts.append(Mount(unescaped(fields[4]), unescaped(fields[3]), more[0], fields[5], more[2]))
    return mounts


def own_mounts() -> list[Mount]:
    """The mounts that this process sees. OSError."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return parse_mounts(file.read())


def hierarchies(mounts: Iterable[Mount]) -> list[Hierarchy]:
    """The cgroup hierarchies that are mounted whole, v2 first: in hybrid mode it holds all processes or none."""
    found = []
    for mount in mounts:
        if mount.kind in _CGROUP_VERSIONS and mount.root == "/":
            version = _CGROUP_VERSIONS[mount.kind]
            has_freezer = version == 2 or "freezer" in mount.super_options.split(",")
            found.append(Hierarchy(version, mount.point, has_freezer))
    return sorted(found, key=lambda hierarchy: -hierarchy.version)


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """The directories of the node's cgroups. `points`: where the hierarchies are mounted."""

    points: tuple[str, ...]

    def owner_uid(self, path: str) -> int | None:
        """A user other than root who owns a directory above `path`, and so may make cgroups there. None: root alone.

        The cgroup's own directory is not looked at: a runtime may give it to the container.
        """
        above = [part for part in path.split("/") if part][:-1]
        for point in self.points:
            here = point
            for part in above:
                here = f"{here}/{part}"
                try:
                    owner = os.stat(here).st_uid
                except OSError:  # this hierarchy does not have it
                    break
                if owner:
                    return owner
        return None

    def exists(self, path: str) -> bool:
        """Whether some hierarchy has this cgroup."""
        return any(Path(point + path).is_dir() for point in self.points)


def folders(top: Path, most: int) -> Iterator[str]:
    """A directory and those below, breadth first, `most` of them; no directory is listed further than that."""
    waiting, left = deque([str(top)]), most - 1
    while waiting:
        here = waiting.popleft()
        yield here
        if not left:
            continue
        with suppress(OSError), os.scandir(here) as entries:
            found = list(islice((one.path for one in entries if one.is_dir(follow_symlinks=False)), left))
            left -= len(found)
            waiting.extend(found)


def join_node_namespace() -> bool:
    """Joins the node's cgroup namespace, for this thread and those that it starts later.

    False where that fails; the log says what is lost.
    """
    try:
        of_node = _node_namespace()
        if os.readlink(of_node) != os.readlink(_OWN):
            _join(of_node)
    except OSError as error:
        action = "give it CAP_SYS_ADMIN and CAP_SYS_PTRACE, or the node's cgroup namespace"
        _log.warning(
            "cgroups are seen from inside the agent's container (%s): nothing is frozen; %s", error.strerror, action
        )
        return False
    return True


def _node_namespace() -> str:
    """That of PID 1; where PID 1 may not be inspected, that of the first kernel thread, if it is the initial one."""
    init, kernel_thread = "/proc/1/ns/cgroup", "/proc/2/ns/cgroup"
    try:
        os.readlink(init)
    except PermissionError:
        if os.readlink(kernel_thread) == _INITIAL:
            return kernel_thread
        raise
    return init


def _join(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWCGROUP):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
