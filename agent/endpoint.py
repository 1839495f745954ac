# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's UNIX socket: one line asks, one line of JSON answers.

gputop asks "snapshot" and gets the last one. Other words are answered by whoever offers them: WORD [ARGUMENT].

Owns /run/gpuwarden/agent.sock (0660, directory 0755). Invariants: one thread serves all, nothing it does waits for a
client (one that neither reads nor writes is cut off by its deadline, and their number is bounded), and a socket file
is replaced only when nobody listens on it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.errors import SetupError, WardenError
from agent.model import Snapshot
from agent.schema import dumps, loads

_log = logging.getLogger(__name__)
PATH: Final = Path("/run/gpuwarden/agent.sock")
REQUEST: Final = b"snapshot\n"
NOTHING_YET: Final = b"null\n"
LONGEST_REQUEST_BYTES: Final = 8192
MOST_CLIENTS: Final = 32
DEADLINE_SECONDS: Final = 5.0
LONGEST_ANSWER_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Client:
    """One connection: what it has asked so far, then what it has yet to read."""

    connection: socket.socket
    deadline: float
    request: bytes = b""
    answer: memoryview | None = None


class Endpoint:
    """Serves snapshots until closed. Counts the clients that it had to cut off in `dropped`.

    `answers`: word → function from the rest of the line to a line of JSON; one that fails is counted in `failed`.
    """

    def __init__(
        self,
        get_snapshot: Callable[[], Snapshot | None],
        path: Path = PATH,
        answers: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        self._get_snapshot, self._path = get_snapshot, path
        self._answers = {word.encode(): answer for word, answer in (answers or {}).items()}
        self.failed = 0
        self._encoded: tuple[Snapshot | None, bytes] = (None, NOTHING_YET)
        self._clients: dict[socket.socket, Client] = {}
        self.dropped = 0
        self._listener = _listen(path)  # the one step that can fail comes before anything that would leak
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._inode = path.stat().st_ino
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket file, if it is still ours."""
        self._wake.close()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._woken:
                    self._shut()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._step(key.data)
            now = time.monotonic()
            for client in [client for client in self._clients.values() if client.deadline <= now]:
                self.dropped += 1
                self._drop(client)

    def _patience(self) -> float | None:
        if not self._clients:
            return None
        return max(0.0, min(client.deadline for client in self._clients.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has hung up already, or we are out of descriptors
            self.dropped += 1
            time.sleep(0.01)  # in the latter case it is still queued, and select returns at once
            return
        if len(self._clients) >= MOST_CLIENTS:
            self.dropped += 1
            connection.close()
            return
        connection.setblocking(False)
        client = self._clients[connection] = Client(connection, time.monotonic() + DEADLINE_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _step(self, client: Client) -> None:
        try:
            done = self._write(client) if client.answer is not None else self._read(client)
        except BlockingIOError:
            return
        except OSError:  # it hung up
            done = True
        if done:
            self._drop(client)

    def _read(self, client: Client) -> bool:
        received = client.connection.recv(LONGEST_REQUEST_BYTES - len(client.request))
        client.request += received
        if not received or not self._may_become(client.request):
            return True
        if client.request.endswith(b"\n"):
            answer = self._answer(client.request)
            if answer is None:
                return True
            client.answer = memoryview(answer)
            self._selector.modify(client.connection, selectors.EVENT_WRITE, client)
        return False

    def _may_become(self, request: bytes) -> bool:
        """Whether this is a request, or the beginning of one."""
        if REQUEST.startswith(request):
            return True
        if b"\n" in request[:-1] or len(request) >= LONGEST_REQUEST_BYTES:
            return False
        word, end, _ = request.rstrip(b"\n").partition(b" ")
        if end or request.endswith(b"\n"):
            return word in self._answers
        return any(known.startswith(word) for known in self._answers)

    def _write(self, client: Client) -> bool:
        assert client.answer is not None
        client.answer = client.answer[client.connection.send(client.answer) :]
        return not client.answer

    def _answer(self, request: bytes) -> bytes | None:
        """None where the one that offered the word failed."""
        if request == REQUEST:
            return self._snapshot()
        word, _, argument = request[:-1].partition(b" ")
        try:
            return self._answers[word](argument.decode(errors="surrogateescape")).encode() + b"\n"
        except Exception:  # noqa: BLE001  # whatever one answer does, the others are served
            if not self.failed:
                _log.exception("a request was not answered; further failures are only counted")
            self.failed += 1
            return None

    def _snapshot(self) -> bytes:
        snapshot = self._get_snapshot()
        if snapshot is not None and snapshot is not self._encoded[0]:
            self._encoded = (snapshot, dumps(snapshot).encode() + b"\n")
        return self._encoded[1]

    def _drop(self, client: Client) -> None:
        self._selector.unregister(client.connection)
        del self._clients[client.connection]
        client.connection.close()

    def _shut(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        for item in (self._listener, self._woken, self._selector):
            item.close()


def fetch(path: Path = PATH, timeout: float = 3.0) -> Snapshot | None:
    """The running agent's last snapshot; None when no agent runs (or it has none within `timeout` seconds).

    SetupError when an agent is there but cannot be asked.
    """
    give_up = time.monotonic() + timeout
    while True:
        line = _ask(path, REQUEST, give_up)
        if line is None:
            return None
        if line != NOTHING_YET:
            return loads(line)
        if time.monotonic() >= give_up:
            return None
        time.sleep(0.05)  # the agent is up and its first tick is not over


def ask(path: Path, word: str, argument: str = "", timeout: float = 10.0) -> bytes | None:
    """The running agent's answer to one word, a line of JSON; None when no agent runs.

    SetupError when an agent is there but cannot be asked, or knows no such word.
    """
    request = f"{word} {argument}".rstrip(" ").encode(errors="surrogateescape") + b"\n"
    return _ask(path, request, time.monotonic() + timeout)


def _ask(path: Path, request: bytes, give_up: float) -> bytes | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.1, give_up - time.monotonic()))
        try:
            connection.connect(str(path))
            connection.sendall(request)
            with connection.makefile("rb") as stream:
                line = stream.readline(LONGEST_ANSWER_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except PermissionError as error:
            raise SetupError(
                f"no permission to ask the agent at {path}: run as root or join the socket's group"
            ) from error
        except OSError as error:
            raise SetupError(f"the agent at {path} does not answer ({error}): see its log") from error
    if not line.endswith(b"\n"):
        raise SetupError(f"the agent at {path} hung up: it has too many clients or is stopping, try again")
    return line


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _clear(path)
        listener.bind(str(path))
        path.chmod(0o660)  # before listen: until then nobody can connect
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
