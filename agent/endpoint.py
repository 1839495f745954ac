# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's UNIX sockets: one line asks, one line of JSON answers.

gputop asks "snapshot" and gets the last one. Other words are answered by whoever offers them: WORD [ARGUMENT]. An order
is answered when it was carried out, on another thread.

Invariants: one thread serves all doors, and nothing it does waits for a client: one that neither reads nor writes is
cut off by its deadline, and of each door their number is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.doors import GROUP, MOST_CLIENTS, RUN_DIR, Door, listen
from agent.errors import SetupError
from agent.model import Snapshot
from agent.schema import dumps, loads

_log = logging.getLogger(__name__)
PATH: Final = RUN_DIR / "agent.sock"
REQUEST: Final = b"snapshot\n"
NOTHING_YET: Final = b"null\n"
LONGEST_REQUEST_BYTES: Final = 8192
DEADLINE_SECONDS: Final = 5.0
ORDER_SECONDS: Final = 300.0  # for an order to be carried out: what is held is released first
LONGEST_ANSWER_BYTES: Final = 64 << 20


@dataclass(slots=True, eq=False)
class Client:
    """One connection: what it has asked so far, then what it has yet to read."""

    connection: socket.socket
    door: Door
    deadline: float
    request: bytes = b""
    answer: memoryview | None = None


class Endpoint:
    """Serves snapshots until closed. Counts the clients that it had to cut off in `dropped`.

    A word of a door that fails is counted in `failed`.
    """

    def __init__(self, get_snapshot: Callable[[], Snapshot | None], doors: Sequence[Door]) -> None:
        self._get_snapshot = get_snapshot
        self.failed = 0
        self._encoded: tuple[Snapshot | None, bytes] = (None, NOTHING_YET)
        self._clients: dict[socket.socket, Client] = {}
        self.dropped = 0
        self._listeners = _opened(doors)  # the one step that can fail comes before anything that would leak
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._told: queue.SimpleQueue[tuple[Client, str]] = queue.SimpleQueue()  # answers to orders
        self._inodes = {door.path: door.path.stat().st_ino for door in doors}
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the socket files that are still ours."""
        self._wake.close()
        self._thread.join()
        for path, inode in self._inodes.items():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._woken:
                    if not self._woken.recv(4096):
                        self._shut()
                        return
                    self._tell()
                elif key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.data.connection in self._clients:
                    self._step(key.data)
            now = time.monotonic()
            for client in [client for client in self._clients.values() if client.deadline <= now]:
                self.dropped += 1
                self._drop(client)

    def _patience(self) -> float | None:
        if not self._clients:
            return None
        return max(0.0, min(client.deadline for client in self._clients.values()) - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client has hung up already, or we are out of descriptors
            self.dropped += 1
            time.sleep(0.01)  # in the latter case it is still queued, and select returns at once
            return
        door = self._listeners[listener]
        if sum(client.door is door for client in self._clients.values()) >= MOST_CLIENTS:
            self.dropped += 1
            connection.close()
            return
        connection.setblocking(False)
        client = self._clients[connection] = Client(connection, door, time.monotonic() + DEADLINE_SECONDS)
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
        if not received or not _may_become(client.request, client.door):
            return True
        return client.request.endswith(b"\n") and not self._heed(client)

    def _heed(self, client: Client) -> bool:
        """Answers, or passes an order on; False where whoever offered the word failed."""
        if client.request == REQUEST:
            self._answer(client, self._snapshot())
            return True
        word, _, argument = client.request[:-1].decode(errors="surrogateescape").partition(" ")
        try:
            if word in client.door.orders:
                client.deadline = time.monotonic() + ORDER_SECONDS
                client.door.orders[word](argument, lambda line: self._tell_later(client, line))
            else:
                self._answer(client, client.door.answers[word](argument).encode() + b"\n")
        except Exception:  # noqa: BLE001  # whatever one answer does, the others are served
            if not self.failed:
                _log.exception("a request was not answered; further failures are only counted")
            self.failed += 1
            return False
        return True

    def _tell_later(self, client: Client, line: str) -> None:
        """On whatever thread."""
        self._told.put((client, line))
        with contextlib.suppress(OSError):  # closed meanwhile
            self._wake.send(b".")

    def _tell(self) -> None:
        while not self._told.empty():
            client, line = self._told.get()
            if client.connection in self._clients:  # else it has hung up
                self._answer(client, line.encode() + b"\n")

    def _answer(self, client: Client, answer: bytes) -> None:
        client.answer, client.deadline = memoryview(answer), time.monotonic() + DEADLINE_SECONDS
        self._selector.modify(client.connection, selectors.EVENT_WRITE, client)

    def _write(self, client: Client) -> bool:
        assert client.answer is not None
        client.answer = client.answer[client.connection.send(client.answer) :]
        return not client.answer

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
        for listener in self._listeners:
            listener.close()
        self._woken.close()
        self._selector.close()


def _opened(doors: Sequence[Door]) -> dict[socket.socket, Door]:
    """All, or none."""
    with ExitStack() as stack:
        listeners = {}
        for door in doors:
            listeners[stack.enter_context(listen(door))] = door
            stack.callback(door.path.unlink)
        stack.pop_all()
    return listeners


def _may_become(request: bytes, door: Door) -> bool:
    """Whether this is a request, or the beginning of one."""
    if REQUEST.startswith(request):
        return True
    if b"\n" in request[:-1] or len(request) >= LONGEST_REQUEST_BYTES:
        return False
    return door.knows(request)


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
                f"no permission to ask the agent at {path}: run as root; read.sock is for members of the group {GROUP}"
            ) from error
        except OSError as error:
            raise SetupError(f"the agent at {path} does not answer ({error}): see its log") from error
    if not line.endswith(b"\n"):
        why = "it takes no such word there, has too many clients or is stopping; try again"
        raise SetupError(f"the agent at {path} hung up: {why}")
    return line
