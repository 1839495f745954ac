# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The MPS control daemons that run here: by their program and arguments in /proc, wherever their pipes are.

A process may call itself what it likes, so nothing of it is run as it stands: a daemon's own program speaks to it only
if root owns that file, nobody else can write it, and it is this mount namespace's; else the one in PATH does. And what
one in another mount namespace says counts only for processes that reach its pipe.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence

from agent.errors import GoneError, SetupError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.mps.model import Daemon

PROGRAM = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_USUAL_DIRECTORIES = ("/run/nvidia-mps", "/tmp/nvidia-mps")
_CONTROL = "control"  # the daemon's socket or FIFO in its directory


def daemons(proc: Procfs) -> tuple[Daemon, ...]:
    """Those that are running now. Whatever cannot be read is none."""
    return tuple(_found(proc))


def _found(proc: Procfs) -> Iterator[Daemon]:
    for tgid in proc.tgids():
        try:
            arguments = proc.arguments(tgid)
            if is_daemon(arguments):
                process = proc.process_id(tgid)
                directory = _pipe_directory(proc, tgid)
                program = _program(proc, tgid)
                if program and proc.process_id(tgid) == process:
                    yield Daemon(process, directory, program)
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


def _pipe_directory(proc: Procfs, tgid: int) -> str:
    named = proc.environ(tgid, [PIPE_VARIABLE]).get(PIPE_VARIABLE)
    root = "" if same_mounts(proc, tgid) else f"{proc.root}/{tgid}/root"
    if named:
        return root + named
    for usual in _USUAL_DIRECTORIES:
        if os.path.exists(f"{root}{usual}/{_CONTROL}"):
            return root + usual
    return root + _USUAL_DIRECTORIES[-1]


def same_mounts(proc: Procfs, tgid: int) -> bool:
    """Whether paths mean to that process what they mean to this one."""
    return os.readlink(f"{proc.root}/{tgid}/ns/mnt") == os.readlink(f"{proc.root}/self/ns/mnt")


def _program(proc: Procfs, tgid: int) -> str | None:
    """What to run to speak to it."""
    path = os.readlink(f"{proc.root}/{tgid}/exe")
    if same_mounts(proc, tgid) and os.path.basename(path) == PROGRAM and _is_roots(f"{proc.root}/{tgid}/exe"):
        return path if _same_file(path, f"{proc.root}/{tgid}/exe") else None
    return shutil.which(PROGRAM)


def _is_roots(path: str) -> bool:
    found = os.stat(path)
    return found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def serves(daemon: Daemon, process: ProcessId, proc: Procfs) -> bool:
    """Whether the process may be a client of this daemon, so that the daemon's word counts for it."""
    try:
        return same_mounts(proc, daemon.process.tgid) or reaches(process, daemon, proc)
    except OSError:
        return False


def reaches(process: ProcessId, daemon: Daemon, proc: Procfs, below: str = "") -> bool:
    """Whether the pipe directory that the process was started with is the daemon's, or one `below` it.

    GoneError when the process has ended.
    """
    own = _identity(f"{daemon.pipe_directory}{below}/{_CONTROL}")
    named = proc.environ(process.tgid, [PIPE_VARIABLE]).get(PIPE_VARIABLE)
    root = f"{proc.root}/{process.tgid}/root"
    places = [named] if named else list(_USUAL_DIRECTORIES)
    return own is not None and any(_identity(f"{root}{place}/{_CONTROL}") == own for place in places)


def _identity(path: str) -> tuple[int, int] | None:
    """The same for all names and mounts of one pipe."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
