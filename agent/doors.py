# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The files of the agent's UNIX sockets, and who may connect to which.

`agent.sock` is its owner's and takes orders; `read.sock` beside it is also for the group gpuwarden, where there is one,
and only answers questions. Invariants: nobody can connect before a file has its mode, and a file is replaced only when
nobody listens on it.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.errors import SetupError, WardenError

_log = logging.getLogger(__name__)
RUN_DIR: Final = Path("/run/gpuwarden")
GROUP: Final = "gpuwarden"
MOST_CLIENTS: Final = 32  # of each socket at a time: who reads keeps nobody from giving orders
_ORDERS, _QUESTIONS = "agent.sock", "read.sock"
HELP: Final = f"the running agent's socket ({RUN_DIR / _ORDERS} as root, else {_QUESTIONS} beside it)"

Answer = Callable[[str], str]  # from the rest of the line to a line
Order = Callable[[str, Callable[[str], None]], None]  # the same, told later, from whatever thread


@dataclass(frozen=True, slots=True)
class Door:
    """A socket file: which words are known behind it besides `snapshot`, and which group may ask besides the owner."""

    path: Path
    answers: Mapping[str, Answer] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)
    group: int | None = None

    def knows(self, request: bytes) -> bool:
        """Whether this is one of its words, or the beginning of one."""
        words = [word.encode() for word in (*self.answers, *self.orders)]
        word, end, _ = request.rstrip(b"\n").partition(b" ")
        if end or request.endswith(b"\n"):
            return word in words
        return any(known.startswith(word) for known in words)


def doors(
    run_dir: Path, answers: Mapping[str, Answer], orders: Mapping[str, Order], group: int | None
) -> tuple[Door, Door]:
    """The agent's two: one for orders and questions, one for questions."""
    return Door(run_dir / _ORDERS, answers, orders), Door(run_dir / _QUESTIONS, answers, group=group)


def readers() -> int | None:
    """The group that may ask; None where there is none."""
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None


def place(run_dir: Path = RUN_DIR) -> Path:
    """Where to ask: as root where orders are taken, as anybody else where questions are."""
    return run_dir / (_ORDERS if os.geteuid() == 0 else _QUESTIONS)


def listen(door: Door) -> socket.socket:
    """SetupError where that cannot be, which says what to do."""
    path = door.path
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear(path)
        listener.bind(str(path))
        path.chmod(_mode(door))  # before listen: until then nobody can connect
        listener.listen(MOST_CLIENTS)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {path} ({error.strerror or error}): run as root, or choose another path"
        ) from error
    except WardenError:
        listener.close()
        raise
    return listener


def _mode(door: Door) -> int:
    if door.group is None:
        return 0o600
    try:
        os.chown(door.path, -1, door.group)
    except PermissionError:
        _log.warning("%s is for its owner alone: it cannot be given to the group %d", door.path, door.group)
        return 0o600
    return 0o660


def _clear(path: Path) -> None:
    """Remove a socket file that a dead agent left; refuse when it is anything else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SetupError(f"{path} is in the way and no socket: move it away, or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        raise SetupError(f"an agent listens on {path} already: stop it first, or choose another path")
    os.unlink(path)
