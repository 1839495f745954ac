# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's UNIX sockets: their paths, who may connect to which, and requests to a running agent (docs/api.md).

`agent.sock` is its owner's and takes orders; `read.sock` beside it is also for the group gpuwarden, where there is one,
and only answers. Invariants: no client can connect before a file has its mode, and a file is replaced only when no
process listens on it. To a command no agent is None, so that it can go on without one; an agent that refuses or does
not answer is a SetupError that says what to do.
"""

from __future__ import annotations

import errno
import grp
import logging
import os
import socket
import stat
import time
from collections.abc import Container
from http import HTTPStatus
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SetupError, WardenError
from agent.core.model import Snapshot
from agent.core.snapshot_json import loads
from agent.node.http_client import FetchError, HttpClient, Response

_log = logging.getLogger(__name__)
RUN_DIR: Final = Path("/run/gpuwarden")
AGENT_SOCK: Final = "agent.sock"
READ_SOCK: Final = "read.sock"
PATH: Final = RUN_DIR / AGENT_SOCK
GROUP: Final = "gpuwarden"
HELP: Final = f"the running agent's socket ({PATH} as root, else {READ_SOCK} beside it)"
MAX_ANSWER_BYTES: Final = 64 << 20
SNAPSHOT: Final = "/v1/snapshot"
EXPLAIN: Final = "/v1/explain"
RELOAD: Final = "/v1/reload"
_RETRY_SECONDS: Final = 0.05
_OK: Final = (HTTPStatus.OK,)


def fetch(path: Path = PATH, timeout: float = 3.0) -> Snapshot | None:
    """The running agent's last snapshot; None when no agent runs, or it has none within `timeout` seconds."""
    deadline_ns = monotonic_ns() + int(timeout * NS_PER_SECOND)
    while True:
        left_seconds = max(0.1, (deadline_ns - monotonic_ns()) / NS_PER_SECOND)
        response = ask(path, SNAPSHOT, timeout=left_seconds, accepted=(HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE))
        if response is None:
            return None
        if response.status == HTTPStatus.OK:
            return loads(response.body)
        if monotonic_ns() >= deadline_ns:
            return None
        time.sleep(_RETRY_SECONDS)  # the agent is up and its first tick is not complete


def ask(
    path: Path, target: str, *, method: str = "GET", timeout: float = 10.0, accepted: Container[int] = _OK
) -> Response | None:
    """The running agent's answer; None when no agent runs. SetupError for a status that is not `accepted`."""
    client = HttpClient(str(path.absolute()), MAX_ANSWER_BYTES)
    try:
        response = client.request(method, target, monotonic_ns() + int(timeout * NS_PER_SECOND))
    except FetchError as error:
        if isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            return None
        raise _unanswered(path, error) from error
    if response.status not in accepted:
        reason = response.body.decode(errors="replace").strip()
        raise SetupError(f"the agent at {path} refused {method} {target} with status {response.status}: {reason}")
    return response


def _unanswered(path: Path, error: FetchError) -> SetupError:
    cause = error.__cause__
    if isinstance(cause, PermissionError):
        return SetupError(
            f"no permission to ask the agent at {path}: run as root; read.sock is for members of the group {GROUP}"
        )
    if isinstance(cause, ConnectionError):
        return SetupError(
            f"the agent at {path} hung up: it is of an older release, which does not speak HTTP "
            "(restart it after an upgrade), has too many clients, or is stopping; try again"
        )
    return SetupError(f"the agent at {path} does not answer ({error}): see its log")


def readers() -> int | None:
    """The group that may read; None where there is none."""
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None


def place(run_dir: Path = RUN_DIR) -> Path:
    """The socket that this user may ask: root that of the orders, others that for reading."""
    return run_dir / (AGENT_SOCK if os.geteuid() == 0 else READ_SOCK)


def listen(path: Path, group: int | None = None) -> socket.socket:
    """A listening socket for its owner, and for `group`. SetupError says what to do."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(_mode(path, group))  # before listen: until then no client can connect
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {path} ({error.strerror or error}): run as root, or choose another path"
        ) from error
    except WardenError:
        listener.close()
        raise
    return listener


def _mode(path: Path, group: int | None) -> int:
    if group is None:
        return 0o600
    try:
        os.chown(path, -1, group)
    except PermissionError:
        _log.warning("%s is for its owner alone: it cannot be given to the group %d", path, group)
        return 0o600
    return 0o660


def _remove_stale(path: Path) -> None:
    """Removes a socket file that a dead agent left; refuses anything else."""
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
