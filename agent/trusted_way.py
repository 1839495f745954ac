# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether others could put another file in a file's place: by the directories and links that lead to it.

A file that only root can write says little in a directory that others can. Each directory on the way has to belong to
root or to whom we run as, and nobody else may write it, but for two that are safe: one with the sticky bit, where each
may replace only what is his (/tmp), and one on a mount that is read-only here. Such is a Kubernetes ConfigMap's volume:
the kubelet makes its directory with mode 0777, where on the node only root can go, and mounts it read-only. A link is
judged by where it lies and by the way to what it names.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_MOST_LINKS: Final = 40  # path_resolution(7)


def exposed_way(path: str | os.PathLike[str]) -> str | None:
    """Who could replace the file, and what to do about it; None: nobody. The file itself is not judged. OSError."""
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
    """Whether others could put something else in the place of this entry of the folder."""
    facts = os.stat(folder)
    if not _is_ours(facts):
        return (
            f"lies in {folder}, which belongs to user {facts.st_uid}, who could put another file in its place; "
            f"move it to a directory of root's, or chown {folder} to root"
        )
    if not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        return None
    if facts.st_mode & stat.S_ISVTX and _is_ours(entry):
        return None
    who = "everybody" if facts.st_mode & stat.S_IWOTH else "its group"
    return f"lies in {folder}, where {who} could put another file in its place; chmod go-w {folder}"


def _is_ours(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid())
