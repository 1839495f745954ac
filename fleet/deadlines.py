# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A socket whose reads end by a deadline, whatever the other side does.

A socket's own timeout restarts with each byte, so a peer that sends one byte a second holds its reader for hours. Here
all reads together have to end by one time. Clients and server of the fleet's service use it.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from functools import partial
from typing import Any, Final

_LEAST_S: Final = 0.001
"""A timeout of 0 would make the socket non-blocking"""


class DeadlineReader(io.RawIOBase):
    """The reading side of a socket. A read that is not done by `deadline_s` raises TimeoutError."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        super().__init__()
        self._socket = connected
        self.deadline_s = deadline_s
        """On time.monotonic()'s clock"""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(max(_LEAST_S, left_s))
        return self._socket.recv_into(buffer)


class DeadlineSocket:
    """What http.client's response wants of a socket: a file to read from."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self._reader = DeadlineReader(connected, deadline_s)

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(self._reader)


def fetch(url: str, timeout_s: float, most_bytes: int) -> bytes:
    """GET, with redirects and proxies as urllib has them; no more than so many bytes, all of them read within the time.

    Raises what urllib.request.urlopen raises.
    """
    deadline_s = time.monotonic() + timeout_s
    with _opener(deadline_s).open(url, timeout=timeout_s) as answer:
        return bytes(answer.read(most_bytes))


class _KeptReader(DeadlineReader):
    """Keeps the socket open until the answer is read: urllib closes it as soon as its head is there."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        super().__init__(connected, deadline_s)
        self._kept = connected.makefile("rb", buffering=0)

    def close(self) -> None:
        super().close()
        self._kept.close()


class _KeptSocket(DeadlineSocket):
    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self._reader = _KeptReader(connected, deadline_s)


def _opener(deadline_s: float) -> urllib.request.OpenerDirector:
    def response(connected: Any, *arguments: Any, **named: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(_KeptSocket(connected, deadline_s), *arguments, **named)  # type: ignore[arg-type]

    def connection(kind: type[http.client.HTTPConnection], host: str, **named: Any) -> http.client.HTTPConnection:
        made = kind(host, **named)
        made.response_class = response  # type: ignore[assignment]
        return made

    class Plain(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(connection, http.client.HTTPConnection), request)

    class Secure(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self.do_open(partial(connection, http.client.HTTPSConnection), request)

    return urllib.request.build_opener(Plain, Secure)
