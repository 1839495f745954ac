# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Files that control the agent: who can have written them, and reading them.

A file is trusted if only root, or the agent's own user, could have written it. The checks are made on the
descriptor that is read, so what was checked is what is used. Bounded, regular files only: a FIFO in a file's place does
not block the agent. Each directory on the path has to belong to root or to the agent's user, and no other user may
write it, but for two that are safe: one with the sticky bit (/tmp), and a Kubernetes ConfigMap that is mounted here
read-only, whose directory has mode 0777 where on the node only root can go. It is recognised by its mount, which only
root can make; that anything else is read-only for the agent says nothing about others. A link is checked by the
directory that it is in and by the path to its target.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Final

from agent.core.errors import TrustError
from agent.node.cgroups import own_mounts

_CONFIGMAP: Final = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~configmap/[^/]+$")  # in the kubelet's directory
_MOST_LINKS: Final = 40  # path_resolution(7)


def exposed_path(path: str | os.PathLike[str]) -> str | None:
    """Who could replace the file, and what to do about it; None: no other user. The file itself aside. OSError."""
    parts = os.path.join(os.getcwd(), os.fspath(path)).split("/")
    here, links = "/", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        entry = os.path.join(here, part)
        facts = os.lstat(entry)
        if (why := _replaceable(here, facts)) is not None:
            return why
        if not stat.S_ISLNK(facts.st_mode):
            here = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        target = os.readlink(entry)
        parts = target.split("/") + parts
        here = "/" if target.startswith("/") else here
    return None


def _replaceable(folder: str, entry: os.stat_result) -> str | None:
    """Whether others could replace this entry of the folder: who, and what to do about it."""
    facts = os.stat(folder)
    if not _is_trusted_owner(facts):
        return (
            f"lies in {folder}, which belongs to user {facts.st_uid}, who could put another file in its place; "
            f"move it to a directory that root owns, or chown {folder} to root"
        )
    if not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    if (facts.st_mode & stat.S_ISVTX and _is_trusted_owner(entry)) or _is_configmap(folder):
        return None
    who = "every user" if facts.st_mode & stat.S_IWOTH else "its group"
    return f"lies in {folder}, where {who} could put another file in its place; chmod go-w {folder}"


def _is_configmap(folder: str) -> bool:
    """Whether a ConfigMap volume of the kubelet is mounted there read-only. Source: proc(5), mountinfo."""
    here = [mount for mount in own_mounts() if mount.point == folder]
    if not here:
        return False
    top = here[-1]  # of several, the last covers the others
    return _CONFIGMAP.search(top.root) is not None and "ro" in top.mount_options.split(",")


def _is_trusted_owner(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid())


def exposed(path: str | os.PathLike[str], status: os.stat_result) -> str | None:
    """Who besides its owner could change or replace the file, and what to do about it; None: no other user. OSError."""
    return _writable(status) or exposed_path(path)


def _writable(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, who could change what the agent does; chown it to root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "every user" if status.st_mode & stat.S_IWOTH else "its group"
        return f"can be written by {who}, who could change what the agent does; chmod go-w it"
    return None


def read(path: str | os.PathLike[str], most_bytes: int) -> tuple[bytes, os.stat_result]:
    """The content of a regular file, at most `most_bytes` and one byte, and its status. Raises OSError, ValueError."""
    # O_NONBLOCK: a FIFO in its place must not block the agent.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        return file.read(most_bytes + 1) if stat.S_ISREG(status.st_mode) else b"", status


def read_trusted(path: Path, most_bytes: int) -> bytes:
    """The content of a file. TrustError: others can write it, it is not regular or too large. OSError, ValueError."""
    content, status = read(path, most_bytes)
    if not stat.S_ISREG(status.st_mode):
        raise TrustError(f"{path} is not a regular file; name one")
    if (why := exposed(path, status)) is not None:
        raise TrustError(f"{path} {why}")
    if len(content) > most_bytes:
        raise TrustError(f"{path} is larger than {most_bytes >> 10} KiB; check that it is the right file")
    return content
