# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether others could put another file in a file's place: by the directories and links that lead to it.

A file that only root can write says little in a directory that others can. Each directory on the way has to belong to
root or to whom we run as, and nobody else may write it, but for two that are safe: one with the sticky bit, where each
may replace only what is his (/tmp), and a Kubernetes ConfigMap that is mounted here read-only: the kubelet makes its
directory with mode 0777, where on the node only root can go. It is known by what is mounted, which only root can
choose. (That anything else is read-only for us, as under systemd's ProtectSystem=strict, says nothing of others.) A
link is judged by where it lies and by the way to what it names.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Final

from agent.proctext import unescaped

_CONFIGMAP: Final = re.compile(r"/pods/[^/]+/volumes/kubernetes\.io~configmap/[^/]+$")  # in the kubelet's directory
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
    if not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    if (facts.st_mode & stat.S_ISVTX and _is_ours(entry)) or _is_configmap(folder):
        return None
    who = "everybody" if facts.st_mode & stat.S_IWOTH else "its group"
    return f"lies in {folder}, where {who} could put another file in its place; chmod go-w {folder}"


def _is_configmap(folder: str) -> bool:
    """Whether a volume of the kubelet's is mounted just there, to be read only. Source: proc(5), mountinfo."""
    found = False
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            _, _, _, root, point, options, *_ = line.split(" ")
            if unescaped(point) == folder:  # of several, the last is on top
                found = _CONFIGMAP.search(root) is not None and "ro" in options.split(",")
    return found


def _is_ours(facts: os.stat_result) -> bool:
    return facts.st_uid in (0, os.geteuid())
