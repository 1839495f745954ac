# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""HTTP on a UNIX socket: one GET at a time, with a time limit over all of it and a longest answer."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from dataclasses import dataclass
from typing import Any

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import SourceError, SourceTimeoutError

MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body."""

    status: int
    body: bytes


class UnixHttp:
    """One socket. `close` may come from any thread and ends a request that is under way."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._lock = threading.Lock()
        self._current: socket.socket | None = None
        self._closed = False

    def get(self, target: str, deadline_ns: int) -> Answer:
        """SourceTimeoutError, SourceError."""
        with _Limited(deadline_ns) as connected:
            self._enter(connected)
            try:
                connected.connect(self._path)
                return self._exchange(connected, target)
            except TimeoutError as error:
                raise SourceTimeoutError(f"{self._path}: {target} was not answered in time") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise SourceError(f"{self._path}: {target}: {error!r}") from error
            finally:
                self._leave()

    def close(self) -> None:
        """For good."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                with contextlib.suppress(OSError):  # not connected yet, or no longer
                    self._current.shutdown(socket.SHUT_RDWR)

    def _enter(self, connected: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self._path}: closed")
            self._current = connected

    def _leave(self) -> None:
        with self._lock:
            self._current = None

    def _exchange(self, connected: socket.socket, target: str) -> Answer:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = connected
        connection.request("GET", target, headers={"Connection": "close"})
        with connection.getresponse() as response:
            body = response.read(self._most_bytes + 1)
        if len(body) > self._most_bytes:
            raise SourceError(f"{self._path}: {target} was answered with more than {self._most_bytes} bytes")
        return Answer(response.status, body)


class _Limited(socket.socket):
    """A socket whose every operation ends by one deadline. (A plain time limit starts anew with each byte.)"""

    def __init__(self, deadline_ns: int) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._deadline_ns = deadline_ns

    def connect(self, address: Any) -> None:
        self._limit()
        super().connect(address)

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        return super().recv_into(*arguments)

    def _limit(self) -> None:
        left_ns = self._deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError
        self.settimeout(left_ns / NS_PER_SECOND)
