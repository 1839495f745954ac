# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The MPS control daemons that run here: by their program and arguments in /proc, wherever their pipes are.

A process may call itself what it likes, so nothing of it is run as it stands: a daemon's own program speaks to it only
if root owns that file, nobody else can write it, and it is this mount namespace's; else the one in PATH does. And what
one in another mount namespace says counts only for processes that reach its pipe. Anybody can begin any number of
processes of that name: the first few are taken, one for each pipe, those of the node before those of containers.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence

from agent.errors import GoneError, SetupError
from agent.model import ProcessId
from agent.procfs import Procfs
from agent.trusted_way import exposed_way
from enforce.mps.model import Daemon, MpsError

_log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_USUAL_DIRECTORIES = ("/run/nvidia-mps", "/tmp/nvidia-mps")
_MOST_DAEMONS = 16
_LONGEST_PATH = 4096  # of the kernel's
_CONTROL = "control"  # the daemon's socket or FIFO in its directory


def daemons(proc: Procfs) -> tuple[Daemon, ...]:
    """Those that are running now. Whatever cannot be read is none."""
    found = sorted(_found(proc), key=lambda one: (not one[0], one[1].process.start_ticks))
    by_pipe: dict[object, Daemon] = {}
    for _, daemon in found:
        pipe = _identity(proc, daemon.process, f"{daemon.pipe_directory}/{_CONTROL}")
        by_pipe.setdefault(pipe or daemon, daemon)  # who comes second is none, whatever it calls itself
    if len(by_pipe) > _MOST_DAEMONS:
        _log.warning("%d processes call themselves %s: %d are looked at", len(by_pipe), PROGRAM, _MOST_DAEMONS)
    return tuple(by_pipe.values())[:_MOST_DAEMONS]


def _found(proc: Procfs) -> Iterator[tuple[bool, Daemon]]:
    """Whether it is the node's own, and what it is."""
    for tgid in proc.tgids():
        try:
            if is_daemon(proc.arguments(tgid)):
                process = proc.process_id(tgid)
                directory = _pipe_directory(proc, process)
                program = _program(proc, tgid)
                if directory and program and proc.process_id(tgid) == process:
                    yield _is_the_nodes(proc, tgid), Daemon(process, directory, program)
        except (GoneError, SetupError, OSError):
            continue


def is_daemon(arguments: Sequence[str]) -> bool:
    """Whether a command line is that of a daemon, not of a program that gives one a command."""
    if not arguments or os.path.basename(arguments[0]) != PROGRAM:
        return False
    return any(_makes_daemon(argument) for argument in arguments[1:])


def _makes_daemon(argument: str) -> bool:
    if argument.startswith("--"):
        return argument in ("--daemon", "--foreground")
    return argument.startswith("-") and ("d" in argument or "f" in argument)


def _pipe_directory(proc: Procfs, process: ProcessId) -> str | None:
    named = proc.environ(process.tgid, [PIPE_VARIABLE]).get(PIPE_VARIABLE)
    if named:
        return named if named.startswith("/") and len(named) < _LONGEST_PATH else None
    there = (usual for usual in _USUAL_DIRECTORIES if _identity(proc, process, f"{usual}/{_CONTROL}"))
    return next(there, _USUAL_DIRECTORIES[-1])


def same_mounts(proc: Procfs, tgid: int) -> bool:
    """Whether paths mean to that process what they mean to this one."""
    return _same_mounts(proc, tgid, "self")


def _is_the_nodes(proc: Procfs, tgid: int) -> bool:
    try:
        return _same_mounts(proc, tgid, 1)
    except OSError:  # we are in a container that may not look at it
        return same_mounts(proc, tgid)


def _same_mounts(proc: Procfs, tgid: int, other: int | str) -> bool:
    return os.readlink(f"{proc.root}/{tgid}/ns/mnt") == os.readlink(f"{proc.root}/{other}/ns/mnt")


def _program(proc: Procfs, tgid: int) -> str | None:
    """What to run to speak to it."""
    path = os.readlink(f"{proc.root}/{tgid}/exe")
    if same_mounts(proc, tgid) and os.path.basename(path) == PROGRAM and _is_roots(path):
        return path if _same_file(path, f"{proc.root}/{tgid}/exe") else None
    return shutil.which(PROGRAM)


def _is_roots(path: str) -> bool:
    """Whether nobody else can change the file, or put another one in its place."""
    found = os.stat(path)
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == 0 and not writable and exposed_way(path) is None


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def serves(daemon: Daemon, process: ProcessId, proc: Procfs) -> bool:
    """Whether the process may be a client of this daemon, so that the daemon's word counts for it. MpsError."""
    try:
        return same_mounts(proc, daemon.process.tgid) or reaches(process, daemon, proc)
    except OSError:
        return False
    except SetupError as error:
        raise MpsError(str(error)) from error


def reaches(process: ProcessId, daemon: Daemon, proc: Procfs, below: str = "") -> bool:
    """Whether the pipe directory that the process was started with is the daemon's, or one `below` it.

    GoneError when the process has ended.
    """
    own = _identity(proc, daemon.process, f"{daemon.pipe_directory}{below}/{_CONTROL}")
    named = proc.environ(process.tgid, [PIPE_VARIABLE]).get(PIPE_VARIABLE)
    places = [named] if named else list(_USUAL_DIRECTORIES)
    return own is not None and any(_identity(proc, process, f"{place}/{_CONTROL}") == own for place in places)


def _identity(proc: Procfs, process: ProcessId, path: str) -> tuple[int, int] | None:
    """The same for all names and mounts of one pipe, as the process finds it."""
    try:
        found = proc.look_inside(process, path)
    except GoneError:
        return None
    return found.st_dev, found.st_ino
