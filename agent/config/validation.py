# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A configuration file read and validated in one pass: the value that it means, or every mistake in it.

The file is judged through the descriptor that is read, so what was judged is what is used. What validates it takes
12 MiB of memory, so the agent has that done by a process that ends (`check_apart`): it reads its policy once a week.

`WatchedFile` keeps the value of the last right reading: a file that is wrong, gone or still being written does not
change it. Files are compared by `stat`, which follows links: an edit in place, a rename over it and a ConfigMap's
swapped `..data` all show as another stamp. inotify would need a watch on every directory that a link leads through, set
anew after each swap, and reports nothing on network file systems.
"""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from agent.config import trusted_file
from agent.config.yaml_source import Problem, Source, YamlPosition
from agent.core.errors import MistakesError

MAX_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checked(Generic[T]):
    """The outcome of checking one file: its value, or what is wrong with it, in file order."""

    name: str  # as messages call it
    refusal: type[MistakesError]
    problems: tuple[Problem, ...] = ()
    value: T | None = None
    text: str = ""  # for excerpts; empty where it may hold secrets
    source: Source = field(default_factory=Source)  # the position of everything in it
    files: tuple[Path, ...] = ()  # it and all that it names
    was_read: bool = True  # false: one of them could not be read, which may pass without any of them changing
    exposed: str | None = None  # who besides its owner could change it, and so what the agent does

    def accepted(self) -> T:
        """The value. Raises `refusal` with all mistakes."""
        if self.value is None:
            raise self.refusal([f"{self.name}:{problem.place.line}: {problem.text}" for problem in self.problems])
        return self.value


@dataclass(frozen=True, slots=True)
class FileText:
    """What reading a file came to: its text, or the problem."""

    text: str = ""
    problem: Problem | None = None
    was_read: bool = True
    exposed: str | None = None


def read_text(path: str | os.PathLike[str], strict: bool) -> FileText:
    """The text of a configuration file. Never raises: that it cannot be read is a problem too.

    `strict` refuses a file that others than root and the agent's user can write; without it `exposed` says so.
    """
    try:
        raw, status = trusted_file.read(path, MAX_BYTES)
        exposed = trusted_file.exposed(path, status)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return _unfit(f"cannot be read ({reason}); check the path and its permissions", was_read=False)
    if not stat.S_ISREG(status.st_mode):
        return _unfit("is not a regular file; name the YAML file")
    if exposed and strict:
        return _unfit(exposed)
    if len(raw) > MAX_BYTES:
        return _unfit("is larger than 1 MiB; check that it is the right file")
    try:
        return FileText(raw.decode("utf-8").removeprefix("\ufeff"), exposed=exposed)
    except UnicodeDecodeError as error:
        return _unfit("is not UTF-8 text; save the file as UTF-8", line=raw.count(b"\n", 0, error.start) + 1)


def _unfit(text: str, line: int = 1, was_read: bool = True) -> FileText:
    return FileText(problem=Problem(YamlPosition(line), text), was_read=was_read)


def check_apart(module: str, path: Path, refusal: type[MistakesError]) -> Checked[Any]:
    """What `python -m MODULE PATH` makes of the file: it ends with `write_checked`. Never raises.

    Where it cannot be started, is killed or takes too long, the file counts as not read, which is tried again; where it
    fails by itself, which is a defect, it would fail again.
    """
    command = [sys.executable, "-I", "-m", module, os.fspath(path)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_LONGEST_SECONDS)
        if done.returncode == 0:
            checked: Checked[Any] = pickle.loads(done.stdout)  # of our own process
            return checked
        what, was_read = f"its process ended with {done.returncode}, the log has what it wrote", done.returncode > 0
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a NUL in the name
        what, was_read = str(error), False
    problem = Problem(YamlPosition(), f"cannot be checked ({what}); free memory and processes, then send SIGHUP")
    return Checked(os.fspath(path), refusal, (problem,), was_read=was_read)


def write_checked(checked: Checked[Any]) -> None:
    """To the process that called `check_apart`."""
    sys.stdout.buffer.write(pickle.dumps(checked))


_LONGEST_SECONDS: Final = 60.0  # a second on a machine that has time for it
SETTLED_SECONDS: Final = 1.0  # a file that was changed more recently may not be complete yet
_MOST_READINGS: Final = 3
Stamp = tuple[int, int, int, int, int]  # device, inode, size, mtime and ctime in ns
Stamps = tuple[Stamp | None, ...]  # None: there is no such file, or it cannot be read
Settled = Callable[[Stamps | None, Stamps], bool]  # (at the last look, now) → whether nothing is writing to them


def unchanged_since_last_look(before: Stamps | None, now: Stamps) -> bool:
    """For a caller that looks at regular intervals: needs no clock, so that none that is set can deceive it."""
    return before == now


def older_than_a_second(_before: Stamps | None, now: Stamps) -> bool:
    """For a caller that looks at any time. A change that is dated in the future says nothing about writing."""
    ages = (time.time() - stamp[-1] / 1e9 for stamp in now if stamp is not None)
    return not any(0 <= age < SETTLED_SECONDS for age in ages)


class WatchedFile(Generic[T]):
    """`check` reads the file. `checked` is the last reading, `value` that of the last right one. Not thread-safe."""

    def __init__(self, path: Path, check: Callable[[Path], Checked[T]], settled: Settled) -> None:
        self.path = path
        self.checked: Checked[T] | None = None
        self.value: T | None = None
        self._check, self._settled = check, settled
        self._files: tuple[Path, ...] = (path,)
        self._read: Stamps = (None,)  # of what was read last; all None: not read, so that whatever exists is new
        self._seen: Stamps | None = None  # at the last look

    def exists(self) -> bool:
        """Whether there is anything to read."""
        return _stamp(self.path) is not None

    def changed(self) -> bool:
        """Whether the files differ from what was read last, and nothing is writing to them."""
        before, self._seen = self._seen, _stamps(self._files)
        return self._seen != self._read and self._settled(before, self._seen)

    def load(self) -> T:
        """Reads now. Raises the format's error with all mistakes; `value` stays as it was then."""
        for _ in range(_MOST_READINGS):
            self._read = self._seen = _stamps(self._files)  # before they are read: a later write is a change
            checked = self._check(self.path)
            files = self._files if checked.value is None and len(checked.files) <= 1 else checked.files or (self.path,)
            if files == self._files:
                break
            self._files = files  # it names others now, whose stamps were not taken
        self.checked = checked
        if not checked.was_read:
            self._read = (None,) * len(self._files)  # to be tried again: no descriptor was left, or a disk failed
        self.value = checked.accepted()
        return self.value


def _stamps(files: Iterable[Path]) -> Stamps:
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
