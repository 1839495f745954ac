# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Files that say what the agent does: read only where nobody but root, or whom it runs as, could have written them.

What is judged is the descriptor that is read, so what was judged is what is used. Bounded, regular files only: a FIFO
in a file's place hangs nobody.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from agent.errors import TrustError
from agent.trusted_way import exposed_way


def exposed(path: str | os.PathLike[str], status: os.stat_result) -> str | None:
    """Who besides its owner could change or replace the file, and what to do about it; None: nobody. OSError."""
    return _writable(status) or exposed_way(path)


def _writable(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}, who could change what the agent does; chown it to root"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        return f"can be written by {who}, who could change what the agent does; chmod go-w it"
    return None


def read(path: str | os.PathLike[str], most_bytes: int) -> tuple[bytes, os.stat_result]:
    """What is in a regular file, a byte more than `most_bytes` at most, and what it is. Raises OSError, ValueError."""
    # O_NONBLOCK: a FIFO in its place must not hang the agent.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        return file.read(most_bytes + 1) if stat.S_ISREG(status.st_mode) else b"", status


def read_trusted(path: Path, most_bytes: int) -> bytes:
    """What is in the file. TrustError where it is not to be trusted, is no file or too large; OSError; ValueError."""
    content, status = read(path, most_bytes)
    if not stat.S_ISREG(status.st_mode):
        raise TrustError(f"{path} is not a regular file; name one")
    if (why := exposed(path, status)) is not None:
        raise TrustError(f"{path} {why}")
    if len(content) > most_bytes:
        raise TrustError(f"{path} is larger than {most_bytes >> 10} KiB; check that it is the one that is meant")
    return content
