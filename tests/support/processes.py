# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes whose root is a folder, as a container's is; entries of a fixture /proc; a watch on a file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.core.model import ProcessId
from agent.node.procfs import Procfs

_WAIT = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); print(flush=True); sys.stdin.read()"
_IN_OPEN, _IN_NONBLOCK = 0x20, os.O_NONBLOCK
_STATE, _START_TICKS, _FIELDS = 0, 19, 49  # of the fields after the command name


@dataclass(frozen=True, slots=True)
class Jail:
    """A folder, and a process that has it as its root."""

    root: Path
    process: ProcessId


@contextmanager
def jailed(root: Path) -> Iterator[Jail]:
    """It waits there until the block is left."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _WAIT, str(root)], stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        try:
            yield Jail(root, Procfs().process_id(process.pid))
        finally:
            process.send_signal(signal.SIGKILL)


@contextmanager
def mounted(source: str, target: Path, *options: str) -> Iterator[None]:
    """mount(8), and umount(8) afterwards."""
    subprocess.run(["mount", *options, source, str(target)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


class Opens:
    """Watches whether a file is opened; O_PATH does not count. A context manager."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_IN_NONBLOCK)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_OPEN) >= 0

    def any(self) -> bool:
        """Since it was made."""
        try:
            return bool(os.read(self._descriptor, 4096))
        except BlockingIOError:
            return False

    def __enter__(self) -> Opens:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def show_process(proc: Path, process: ProcessId, state: str = "S") -> None:
    """Makes the process appear there, or changes its state."""
    fields = ["0"] * _FIELDS
    fields[_STATE], fields[_START_TICKS] = state, str(process.start_ticks)
    folder = proc / str(process.tgid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{process.tgid} (training) {' '.join(fields)}\n")
