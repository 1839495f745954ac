# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One item in a process of its own, with a limit: rows as they come, and the end of everything that it began."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from gpu import offspring
from gpu.item import WHOLE
from gpu.look import ROOT
from gpu.row import Row, failed, row_from

RUN_VARIABLE: Final = "GPUWARDEN_GPU_RUN"
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLEANING_SECONDS: Final = 8.0  # for an item that is asked to end to undo what it did
_DYING_SECONDS: Final = 5.0  # of what was killed: in the kernel, it may hang for ever
_STEP_SECONDS: Final = 0.05
_MOST_ROW_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Attempt:
    """How items are run. `folder` is the run's own: it is the value of a variable by which what they began is found.

    `adopting`: this process adopts orphans (adopt_orphans) and has no children but items, so all below it is theirs.
    """

    folder: Path
    log: IO[bytes]  # what they print
    environment: Mapping[str, str]
    quick: bool
    adopting: bool = False
    program: Sequence[str] = (sys.executable, "-m", "gpu.item")
    _stuck: set[offspring.Process] = field(default_factory=set)  # they do not die; told, and waited for, once

    def rows(self, name: str, seconds: float) -> Generator[Row, None, None]:
        """Ends within `seconds` and some more for the cleaning, which closing it does too."""
        reading, writing = os.pipe()
        try:
            process = self._start(name, writing, seconds)
        finally:
            os.close(writing)
        whats: set[str] = set()
        stuck_before = set(self._stuck)
        try:
            deadline = time.monotonic() + seconds
            for line in _lines(reading, process, deadline):
                yield _checked(name, line, whats)
            if process.poll() is None:
                yield failed(name, WHOLE, f"not done within its {seconds:g} s: ended")
            elif process.returncode:
                yield failed(name, WHOLE, f"ended with {_said(process.returncode)}; the log has what it printed")
        finally:
            os.close(reading)
            _ask(process)
            left = self.sweep(process)
            stuck = [offspring.name(one) for one in sorted(self._stuck - stuck_before)]
        if stuck:
            yield failed(name, "what is killed dies", f"does not die, hangs in the kernel: {', '.join(stuck)}")
        if left and process.returncode == 0:
            yield failed(name, "nothing is left running", f"it left processes, which were ended: {', '.join(left)}")

    def sweep(self, process: subprocess.Popen[bytes] | None = None) -> list[str]:
        """Ends all that was begun in this run, the item's own process too. Returns the names of the others."""
        found = self._begun(process)
        names = [offspring.name(one) for one in found if process is None or one.pid != process.pid]
        with _unfrozen(found):
            self._stuck.update(offspring.end(found))
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DYING_SECONDS)
        _reap(found)
        return [name for name in names if name]

    def _begun(self, process: subprocess.Popen[bytes] | None) -> list[offspring.Process]:
        roots = [os.getpid()] if self.adopting else []
        if process is not None and (process.poll() is None or not Path(f"/proc/{process.pid}").exists()):
            roots.append(process.pid)  # its session keeps the number; where somebody has it, there is no such session
        below = (one for root in roots for one in offspring.descendants(root))
        return sorted({*below, *offspring.with_variable(f"{RUN_VARIABLE}={self.folder}")} - self._stuck)

    def _start(self, name: str, writing: int, seconds: float) -> subprocess.Popen[bytes]:
        command = [*self.program, name, "--run", str(self.folder), "--rows-to", str(writing), "--seconds", str(seconds)]
        self.log.write(f"\n== {name}\n".encode())
        self.log.flush()
        return subprocess.Popen(
            [*command, *(["--quick"] if self.quick else [])],
            env={**os.environ, **self.environment, RUN_VARIABLE: str(self.folder), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            pass_fds=[writing],
            start_new_session=True,
        )


def adopt_orphans() -> None:
    """What loses its parent becomes this process's child, not that of the first process: so daemons are found too."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lines(reading: int, process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Until the process has ended, or the time is over. A child of it may hold the pipe: its end says nothing."""
    rest = b""
    while True:
        ended = process.poll() is not None
        while select.select([reading], [], [], 0 if ended else _STEP_SECONDS)[0]:
            given = os.read(reading, _MOST_ROW_BYTES)
            *lines, rest = (rest + given).split(b"\n")
            yield from lines
            if not given or time.monotonic() > deadline:
                break
        if ended or time.monotonic() > deadline:
            return
        if process.poll() is None:
            time.sleep(_STEP_SECONDS)  # the pipe was closed too early, or is quiet


def _checked(name: str, line: bytes, whats: set[str]) -> Row:
    try:
        row = row_from(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        return failed(name, WHOLE, f"what it wrote is no row ({error}): {line[:200].decode(errors='replace')}")
    if row.item != name or row.what in whats:
        return failed(name, row.what, "the item's own mistake: a row of another item, or one that was there before")
    whats.add(row.what)
    return row


def _said(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


@contextmanager
def _unfrozen(processes: Iterable[offspring.Process]) -> Iterator[None]:
    """The control groups with our name that they were put into are thawed, for what is frozen does not end, and go."""
    from bench import cgroups

    paths = {path for one in processes for path in _groups(one.pid)}.difference(_groups(os.getpid()))
    for path in paths:
        with suppress(OSError):  # it was removed meanwhile
            cgroups.thaw(path)
    yield
    for path in paths:
        cgroups.remove(path, ())


def _groups(pid: int) -> Iterator[str]:
    """In every hierarchy the first one on the way to it, below the root."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            first = line.partition("/")[2].partition("/")[0]
            if first.startswith("gpuwarden-"):
                yield f"/{first}"


def _ask(process: subprocess.Popen[bytes]) -> None:
    """To end, and to undo what it did; it may have been stopped."""
    if process.poll() is not None:
        return
    for number in (signal.SIGCONT, signal.SIGTERM):
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLEANING_SECONDS)


def _reap(ended: Sequence[offspring.Process]) -> None:
    """Those of them that this process has adopted."""
    for process in ended:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)
