# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which cgroup holds an offline container, all of it and nothing else, so that freezing it stops nobody else.

Every cgroup below it is looked at, and every process in there, whether it uses a GPU or not. Whatever is in doubt is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from agent.containers.identity import identify
from agent.errors import GoneError, SetupError, WardenError
from agent.model import Container, ContainerKey
from agent.procfs import Procfs
from enforce.freezer import Place
from enforce.model import Subject

_MOST_FOLDERS = 1024
# As /proc shows them, cut at 15. Frozen, the first would take other containers along, the last their clients.
_SHARED_BY_OTHERS: Final = frozenset(
    {
        *("containerd", "containerd-shim", "dockerd", "kubelet", "crio", "conmon", "podman", "runc", "crun"),
        *("nvidia-persiste", "nv-fabricmanage", "nvidia-cuda-mps"),
    }
)


class NotFreezableError(WardenError):
    """The container cannot be frozen here and now; the message says why."""


def hierarchies(mountinfo: str) -> list[tuple[int, str]]:
    """Where a freezer is: (version, mount point), v2 first. Only those that are mounted whole."""
    found = []
    for line in mountinfo.split("\n"):
        head, separator, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3 or fields[3] != "/":
            continue
        if kind[0] == "cgroup2":
            found.append((2, fields[4]))
        elif kind[0] == "cgroup" and "freezer" in kind[2].split(","):
            found.append((1, fields[4]))
    return sorted(found, key=lambda one: -one[0])


def freezable(subject: Subject, proc: Procfs, spared: Collection[int] = ()) -> Place:
    """Where to freeze it. `spared`: tgids that must not be in there. Raises NotFreezableError."""
    container = subject.container
    if container.cgroup.strip("/") == "":
        raise NotFreezableError("it has no cgroup of its own")
    living = {process.tgid for process in subject.processes if proc.is_alive(process)}
    if not living:
        raise NotFreezableError("none of its processes runs")
    for version, root in hierarchies(proc.mounts(os.getpid())):
        folder = Path(root + container.cgroup)
        if not (folder / ("cgroup.freeze" if version == 2 else "freezer.state")).exists():
            continue
        within = set(_members(folder, Path(root), container))
        if living <= within:
            _check(container.key, within, proc, spared)
            return Place.of(version, str(folder))
    raise NotFreezableError(f"no freezer has all of its processes in {container.cgroup}")


def _members(folder: Path, root: Path, container: Container) -> Iterator[int]:
    for count, (below, _, _) in enumerate(os.walk(folder)):
        if count >= _MOST_FOLDERS:
            raise NotFreezableError(f"more than {_MOST_FOLDERS} cgroups lie in {folder}")
        try:
            tgids = [int(word) for word in (Path(below) / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            continue
        except OSError as error:
            raise NotFreezableError(f"cgroup {below} cannot be read ({error.strerror})") from error
        path = "/" + os.path.relpath(below, root)
        if tgids and identify(path).key != container.key:
            raise NotFreezableError(f"its cgroup also holds {identify(path).name}")
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
            comm = proc.stat(tgid).comm
        except GoneError:
            continue
        except SetupError as error:
            raise NotFreezableError(str(error)) from error
        if comm in _SHARED_BY_OTHERS:
            raise NotFreezableError(f"its cgroup holds {comm}, which others depend on")
