# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes that a run has begun, wherever they went, and their end.

A daemon leaves its session and its parent, but not the environment that it was given: a variable with a value of this
run's own finds it. A process is a pid and the time of its start, so that no other's number is signalled.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.harness.wait import poll

_TERM_SECONDS = 3.0
_KILL_SECONDS = 10.0
_STEP_SECONDS = 0.02


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """`started`: in clock ticks since the machine's start."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Stat:
    process: Process
    name: str
    state: str
    parent: int
    session: int


def name(process: Process) -> str:
    """As the kernel has it, 15 characters at most; "" when it is gone."""
    stat = _stat(process.pid)
    return stat.name if stat is not None and stat.process == process else ""


def named(beginning: str) -> list[Process]:
    """All that run whose name begins so; of the name there are 15 characters."""
    return [stat.process for stat in _others() if stat.name.startswith(beginning[:15])]


def with_variable(variable: str) -> list[Process]:
    """All but this one that were given `NAME=VALUE` in their environment and still run."""
    wanted = variable.encode()
    return [s.process for s in _others() if wanted in _environment(s.process.pid).split(b"\0")]


def descendants(pid: int) -> list[Process]:
    """Its children, theirs, and all that are left of its session; not itself."""
    all_of_them = list(_others())
    found: dict[int, Process] = {}
    grew = True
    while grew:
        fresh = [
            s
            for s in all_of_them
            if s.process.pid not in found
            and s.process.pid != pid
            and (s.parent == pid or s.parent in found or s.session == pid)
        ]
        found.update((s.process.pid, s.process) for s in fresh)
        grew = bool(fresh)
    return sorted(found.values())


def end(processes: Iterable[Process]) -> list[Process]:
    """Continues, asks, then kills them. Returns those that are still there: in the kernel, or not ours to end."""
    left = list(processes)
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        for process in left:
            send(process, signal.SIGCONT)
            send(process, number)
        poll(lambda: not any(map(runs, left)), seconds, _STEP_SECONDS)  # noqa: B023 - it ends within this turn
        left = [process for process in left if runs(process)]
    return left


def send(process: Process, number: signal.Signals) -> None:
    """To this process and to no later one of its pid. Nothing happens where it is gone or not ours."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel without: what is left is the look just before
        if runs(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
        return
    try:
        if runs(process):
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def runs(process: Process) -> bool:
    """Whether it is there and not merely waited for."""
    stat = _stat(process.pid)
    return stat is not None and stat.process == process and stat.state not in "ZX"


def _others() -> Iterator[_Stat]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            stat = _stat(int(entry.name))
            if stat is not None and stat.state not in "ZX":
                yield stat


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    state, parent, _, session = fields[:4]
    return _Stat(Process(pid, int(fields[19])), head.partition("(")[2], state, int(parent), int(session))


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
