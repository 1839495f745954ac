# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The MPS control daemons that run here: by their program and arguments in /proc, wherever their pipes are.

Any process may take that name, so nothing of it is run without a check: a daemon's own program is used to speak to it
only if root owns the file, no other user can write it, and it is in this mount namespace; else the one in PATH is used.
What a daemon in another mount namespace answers counts only for processes that reach its pipe. Where several processes
claim one pipe, the node's root daemon is the daemon; else the pipe is contested: it is unknown whose PIDs the answers
are about, or when the daemon has ended, so nothing is asked or set there.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent.config.trusted_file import exposed_path
from agent.core.errors import GoneError, SetupError
from agent.core.model import ProcessId
from agent.node import proc_parse
from agent.node.procfs import Procfs
from enforce.actuators.mps.model import Daemon, MpsError

_log = logging.getLogger(__name__)
PROGRAM = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_USUAL_DIRECTORIES = ("/run/nvidia-mps", "/tmp/nvidia-mps")
MAX_DAEMONS = 16
_LONGEST_PATH = 4096  # of the kernel's
_CONTROL = "control"  # the daemon's socket or FIFO in its directory
_OTHERS, _NODES, _ROOTS = range(3)  # in a container's mounts; in the node's; in the node's, and root


@dataclass(frozen=True, slots=True)
class _Candidate:
    rank: int
    daemon: Daemon


@dataclass(frozen=True, slots=True)
class DaemonCandidates:
    """All processes that may be daemons, and why another one could not be read ("": none)."""

    daemons: tuple[Daemon, ...]
    unread: str = ""


def daemons(proc: Procfs) -> tuple[Daemon, ...]:
    """The daemons that run now: one for each pipe, and at most MAX_DAEMONS. A process that cannot be read is none."""
    by_pipe: dict[object, Daemon] = {}
    for pipe, daemon in _by_pipe(proc, _found(proc)[0]):
        by_pipe.setdefault(pipe, daemon)
    if len(by_pipe) > MAX_DAEMONS:
        _log.warning("%d processes are called %s: only %d are asked", len(by_pipe), PROGRAM, MAX_DAEMONS)
    return tuple(by_pipe.values())[:MAX_DAEMONS]


def daemon_candidates(proc: Procfs) -> DaemonCandidates:
    """Every process that may be a daemon, however many: for a caller that must not overlook one."""
    found, unread = _found(proc)
    return DaemonCandidates(tuple(daemon for _, daemon in _by_pipe(proc, found)), unread)


def _by_pipe(proc: Procfs, found: Sequence[_Candidate]) -> Iterator[tuple[object, Daemon]]:
    """Each with its pipe, the node's first, then the oldest; without those that claim the pipe of root's daemon."""
    by_pipe: dict[object, list[_Candidate]] = {}
    for candidate in sorted(found, key=lambda one: (-one.rank, one.daemon.process.start_ticks)):
        daemon = replace(candidate.daemon, pipe=_pipe(proc, candidate.daemon))
        by_pipe.setdefault(daemon.pipe or daemon, []).append(replace(candidate, daemon=daemon))
    for pipe, candidates in by_pipe.items():
        first = [candidate for candidate in candidates if candidate.rank == _ROOTS] or candidates
        for candidate in first:
            yield pipe, replace(candidate.daemon, contested=len(first) > 1)


def _pipe(proc: Procfs, daemon: Daemon) -> tuple[int, int] | None:
    """None for one whose pipe is not there, or may not be looked at."""
    try:
        return _identity(proc, daemon.process, f"{daemon.pipe_directory}/{_CONTROL}")
    except SetupError:
        return None


def _found(proc: Procfs) -> tuple[list[_Candidate], str]:
    """And why one of them could not be read."""
    found, unread = [], ""
    for tgid in proc.tgids():
        try:
            if not is_daemon(proc.arguments(tgid)):
                continue
        except (GoneError, SetupError):
            continue
        try:
            candidate = _candidate(proc, tgid)
            if candidate is not None:
                found.append(candidate)
        except (GoneError, FileNotFoundError, ProcessLookupError):
            continue
        except (SetupError, OSError) as error:
            unread = f"process {tgid} may be an MPS control daemon and cannot be read ({error})"
    return found, unread


def _candidate(proc: Procfs, tgid: int) -> _Candidate | None:
    process = proc.process_id(tgid)
    directory, program = _pipe_directory(proc, process), _program(proc, tgid)
    if directory is None or proc.process_id(tgid) != process:
        return None
    rank = _NODES if _is_the_nodes(proc, tgid) else _OTHERS
    if rank == _NODES and proc_parse.parse_status_uid(proc.status(tgid)) == 0:
        rank = _ROOTS
    return _Candidate(rank, Daemon(process, directory, program))


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
    there = [usual for usual in _USUAL_DIRECTORIES if _may_be_there(proc, process, f"{usual}/{_CONTROL}")]
    if len(there) > 1:  # a daemon that ends leaves its sockets where they are
        there = [usual for usual in there if proc.listens_at(process.tgid, f"{usual}/{_CONTROL}")] or there
    return there[0] if there else _USUAL_DIRECTORIES[-1]


def _may_be_there(proc: Procfs, process: ProcessId, path: str) -> bool:
    try:
        return _identity(proc, process, path) is not None
    except SetupError:
        return True


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


def _program(proc: Procfs, tgid: int) -> str:
    """The program that speaks to it."""
    path = os.readlink(f"{proc.root}/{tgid}/exe")
    its_own = same_mounts(proc, tgid) and os.path.basename(path) == PROGRAM and _is_roots(path)
    if its_own and _same_file(path, f"{proc.root}/{tgid}/exe"):
        return path
    return shutil.which(PROGRAM) or PROGRAM  # if that cannot be run there is no answer


def _is_roots(path: str) -> bool:
    """Whether only root can change the file, or put another one in its place."""
    found = os.stat(path)
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == 0 and not writable and exposed_path(path) is None


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def serves(daemon: Daemon, process: ProcessId, proc: Procfs) -> bool:
    """Whether the process may be a client of this daemon, so that the daemon's answers count for it. MpsError."""
    try:
        return same_mounts(proc, daemon.process.tgid) or reaches(process, daemon, proc)
    except (FileNotFoundError, ProcessLookupError):  # the daemon has ended
        return False
    except (OSError, SetupError) as error:
        raise MpsError(str(error)) from error


def reaches(process: ProcessId, daemon: Daemon, proc: Procfs, below: str = "") -> bool:
    """Whether the pipe directory that the process was started with is the daemon's, or one `below` it.

    GoneError when the process has ended; SetupError when its directory may not be looked at, so that it may be. One
    whose directory may be is no client of a daemon whose own may not.
    """
    named = proc.environ(process.tgid, [PIPE_VARIABLE]).get(PIPE_VARIABLE)
    places = [named] if named else list(_USUAL_DIRECTORIES)
    there = [_identity(proc, process, f"{place}/{_CONTROL}") for place in places]
    try:
        own = _identity(proc, daemon.process, f"{daemon.pipe_directory}{below}/{_CONTROL}")
    except SetupError:
        return False
    return own is not None and own in there


def _identity(proc: Procfs, process: ProcessId, path: str) -> tuple[int, int] | None:
    """The same for all names and mounts of one pipe, as the process finds it."""
    try:
        found = proc.look_inside(process, path)
    except GoneError:
        return None
    return found.st_dev, found.st_ino
