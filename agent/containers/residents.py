# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""All processes of a container, those that use no GPU included: out of its cgroup, and of those below.

A cgroup inside a container's may be another container (Docker in Docker), so each process is asked once whose it is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from agent.containers.index import ContainerIndex
from agent.errors import GoneError, SetupError
from agent.model import Container, ContainerKey
from agent.procfs import Procfs

_MOST_FOLDERS = 1024  # of a container that may make cgroups of its own, it may make any number
_TYPES = {"cgroup2": 0, "cgroup": 1}  # v2 first: where both are, it has everything or nothing


def hierarchies(mountinfo: str) -> list[str]:
    """Where whole cgroup hierarchies are mounted, v2 first. Source: proc(5), mountinfo."""
    found = []
    for line in mountinfo.split("\n"):
        head, separator, tail = line.partition(" - ")
        kind = tail.split(" ")[0]
        fields = head.split(" ")
        if separator and kind in _TYPES and fields[3] == "/":
            found.append((_TYPES[kind], fields[4]))
    return [place for _, place in sorted(found, key=lambda one: one[0])]


class Residents:
    """Not thread-safe: it belongs to one thread, as does its index."""

    def __init__(self, proc: Procfs) -> None:
        self._proc, self._index = proc, ContainerIndex(proc)
        self._known: dict[ContainerKey, dict[int, bool]] = {}

    def of(self, container: Container) -> set[int]:
        """The tgids of now. Empty where its cgroup cannot be seen."""
        before = self._known.get(container.key, {})
        now = {
            tgid: before[tgid] if tgid in before else self._belongs(tgid, container.key)
            for tgid in self._listed(container.cgroup)
        }
        self._known[container.key] = now
        return {tgid for tgid, belongs in now.items() if belongs}

    def forget(self, container: ContainerKey) -> None:
        """Drops what is kept about a container."""
        self._known.pop(container, None)

    def _belongs(self, tgid: int, key: ContainerKey) -> bool:
        try:
            return self._index.container_of(self._proc.process_id(tgid)).key == key
        except (GoneError, SetupError):
            return False

    def _listed(self, path: str) -> set[int]:
        """Of the first hierarchy that has any."""
        for root in hierarchies(self._proc.mounts(os.getpid())):
            if found := set(_members(Path(root) / path.lstrip("/"))):
                return found
        return set()


def _members(folder: Path) -> Iterator[int]:
    for here in _folders(folder):
        try:
            text = Path(here, "cgroup.procs").read_text()
        except OSError:  # it was removed meanwhile, or is a threaded one: its domain lists its processes
            continue
        yield from (int(word) for word in text.split() if word != "0")


def _folders(top: Path) -> Iterator[str]:
    """It and those below, the upper ones first; no more of a directory is listed than is still wanted."""
    waiting, left = deque([str(top)]), _MOST_FOLDERS - 1
    while waiting:
        here = waiting.popleft()
        yield here
        if not left:
            continue
        with suppress(OSError), os.scandir(here) as entries:
            found = list(islice((one.path for one in entries if one.is_dir(follow_symlinks=False)), left))
            left -= len(found)
            waiting.extend(found)
