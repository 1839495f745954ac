# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Cgroups that tests and benches made: find them in every hierarchy (v1, hybrid, v2), empty them, remove them.

Only what is in a container's own cgroup is ever killed, and only directories that were not there before are removed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agent.node import cgroups
from tools.harness.wait import until

PLACE = Path("/sys/fs/cgroup")
_EMPTY_WITHIN_SECONDS = 10.0
_NOT_FOR_US = ("cpuset", "cpu", "cpuacct")  # v1 controllers in which a fresh cgroup takes no process, or slows it


def hierarchies() -> list[Path]:
    """Mount points of the cgroup hierarchies that are mounted whole, v2 first."""
    return [Path(each.point) for each in cgroups.hierarchies(cgroups.own_mounts())]


def hierarchy() -> Path:
    """Where a cgroup of ours is made that has to be in one only: v2 where there is one."""
    found = hierarchies()
    unified = [root for root in found if (root / "cgroup.controllers").exists()]
    return [*unified, *(root for root in found if root.name not in _NOT_FOR_US)][0]


@contextmanager
def own(path: str) -> Iterator[Path]:
    """Makes an empty cgroup. After the block it is emptied and removed, with all that was made for it."""
    mounted, made = mount_if_none(), missing(path)
    try:
        folder = hierarchy() / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        empty(path)
        remove(path, made)
        if mounted:
            unmount()


def mount_if_none() -> bool:
    """Mounts v2 where nothing mounted any cgroups (a chroot with a bare /sys); whether it did."""
    if hierarchies():
        return False
    subprocess.run(["mount", "-t", "cgroup2", "cgroup2", PLACE], check=True)
    return True


def unmount() -> None:
    """Undoes `mount_if_none`."""
    subprocess.run(["umount", "--lazy", PLACE], check=True)


def folders(path: str) -> list[Path]:
    """The directories of one cgroup path that exist, one per hierarchy at most."""
    candidates = (root / path.lstrip("/") for root in hierarchies())
    return [folder for folder in candidates if folder.is_dir()]


def missing(path: str) -> list[Path]:
    """Those directories on the way to `path` (itself included) that do not exist yet, in every hierarchy."""
    parts = [part for part in path.split("/") if part]
    steps = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return [root / step for root in hierarchies() for step in steps if not (root / step).exists()]


def empty(path: str) -> None:
    """Kills everything in that cgroup and below, frozen processes too. TimeoutError when something does not die.

    A process that is tearing down its GPU contexts has left cgroup.procs, and v2 still counts it: until then none
    can be removed.
    """

    def members() -> set[int]:
        return {tgid for folder in folders(path) for tgid in _members(folder)}

    def is_empty() -> bool:
        tgids = members()
        for tgid in tgids:
            with suppress(ProcessLookupError):
                os.kill(tgid, signal.SIGKILL)
        if tgids:
            thaw(path)
        return not tgids and not any(_is_populated(folder) for folder in folders(path))

    until(is_empty, lambda: f"processes {sorted(members())} of cgroup {path} to die", _EMPTY_WITHIN_SECONDS)


def thaw(path: str) -> None:
    """Thaws a cgroup and all below."""
    for folder in folders(path):
        _thaw(folder)


def remove(path: str, made: Iterable[Path]) -> set[Path]:
    """Removes an emptied cgroup, and those out of `made` that nothing lies under any more. Returns what is left."""
    for folder in folders(path):
        for below in sorted(_tree(folder), key=_depth, reverse=True):
            _rmdir(below)
    return {folder for folder in sorted(made, key=_depth, reverse=True) if not _rmdir(folder)}


def _depth(folder: Path) -> int:
    return len(folder.parts)


def _rmdir(folder: Path) -> bool:
    """Whether it is gone. Busy ones stay: they hold other cgroups or processes."""
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _members(folder: Path) -> Iterator[int]:
    for below in _tree(folder):
        try:
            text = (below / "cgroup.procs").read_text()
        except OSError:  # removed meanwhile, or threaded
            continue
        yield from (int(word) for word in text.split() if word != "0")


def _is_populated(folder: Path) -> bool:
    """v2 alone says."""
    try:
        return "populated 1" in (folder / "cgroup.events").read_text()
    except OSError:
        return False


def _thaw(folder: Path) -> None:
    for below in _tree(folder):
        for name, value in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            file = below / name
            if file.exists():
                file.write_text(value)


def _tree(folder: Path) -> list[Path]:
    return [Path(name) for name, _, _ in os.walk(folder)]
