# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One HTTP request over TCP, TLS or a UNIX socket, with one deadline over all of it and a bound on the answer.

The server may be hostile: it may send a byte a second, send without end, or redirect. Nothing is followed, no
connection is kept, and no answer is read beyond its bound, not even where a chunk's length is negative, which
http.client takes for "to the end". Only the look-up of a host name may exceed the deadline.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError, SourceTimeoutError

MAX_PAGE_BYTES: Final = 4 << 20
_PORTS: Final = {"http": 80, "https": 443}
_HEADERS: Final = {"Connection": "close", "User-Agent": "gpuwarden"}
_FRAMING_BYTES: Final = 256 << 10  # of an answer beside its body: headers, and as much as the body again for chunks
_PAGE_HEADERS: Final = {"Accept": "text/plain;version=0.0.4"}


class Failure(StrEnum):
    """Why there is nothing to read: a closed set, because it is a metric's label."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    TLS = "tls"
    STATUS = "status"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    ABSENT = "absent"  # the page is there, the histogram is not


_ADVICE: Final = {  # for pages that a policy names
    Failure.UNREACHABLE: "check slo.url and that the service runs",
    Failure.TIMEOUT: "give an address that is quicker",
    Failure.TLS: "use a certificate that this machine trusts, or http",
    Failure.TOO_LARGE: "give a smaller page",
    Failure.MALFORMED: "check slo.url",
}


class FetchError(SourceError):
    """No answer, or none that can be read. Its cause is the OSError or HTTPException, where there is one."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class FetchTimeoutError(FetchError, SourceTimeoutError):
    """The answer was not complete at the deadline."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of any status, redirects included."""

    status: int
    body: bytes


def fetch(url: str, deadline_ns: int, max_bytes: int = MAX_PAGE_BYTES) -> str:
    """The text of a page that a policy names, by http or https. FetchError says what to change."""
    parts = urlsplit(url)
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", max_bytes, read_refusals=False)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        response = client.request("GET", target, deadline_ns, _PAGE_HEADERS)
    except FetchError as error:
        raise FetchError(error.failure, f"{error}; {_ADVICE[error.failure]}") from error
    if response.status != http.client.OK:
        is_redirect = 300 <= response.status < 400
        advice = "redirects are not followed, give the page's own address" if is_redirect else "check slo.url"
        raise FetchError(Failure.STATUS, f"{url} answered with status {response.status}; {advice}")
    return response.body.decode("utf-8", "replace")


class HttpClient:
    """Requests to one server, one at a time, each on a connection of its own.

    `server` is http://HOST[:PORT], https://HOST[:PORT] or the absolute path of a UNIX socket. `close` is for any thread
    and ends a request that is under way. `read_refusals`: else the body of an answer other than 200 is left out, so
    that its status is known whatever follows it.
    """

    def __init__(self, server: str, max_bytes: int, *, read_refusals: bool = True) -> None:
        self._server, self._max_bytes, self._read_refusals = server, max_bytes, read_refusals
        self._lock = threading.Lock()
        self._current: socket.socket | None = None
        self._closed = False

    def request(self, method: str, target: str, deadline_ns: int, headers: dict[str, str] | None = None) -> Response:
        """The answer to one request without a body. FetchError, FetchTimeoutError."""
        what = f"{self._server}{'' if '://' in self._server else ': '}{target}"
        try:
            with self._connect(deadline_ns) as connected:
                connected.left_bytes = 2 * self._max_bytes + _FRAMING_BYTES
                return self._exchange(connected, method, target, {**_HEADERS, **(headers or {})})
        except _TooLargeError as error:
            text = f"{what} is more than {self._max_bytes >> 20} MiB"
            raise FetchError(Failure.TOO_LARGE, text) from error
        except TimeoutError as error:
            raise FetchTimeoutError(Failure.TIMEOUT, f"{what} was not answered in time") from error
        except ssl.SSLError as error:
            raise FetchError(Failure.TLS, f"{what}: {error}") from error
        except OSError as error:
            raise FetchError(Failure.UNREACHABLE, f"{what}: {error.strerror or error}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise FetchError(Failure.MALFORMED, f"{what} was not answered in HTTP ({error!r:.80})") from error
        finally:
            with self._lock:
                self._current = None

    def close(self) -> None:
        """Ends a request that is under way; later ones fail."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                with contextlib.suppress(OSError):  # not connected yet, or no longer
                    self._current.shutdown(socket.SHUT_RDWR)

    def _connect(self, deadline_ns: int) -> _DeadlineSocket:
        if "://" not in self._server:
            return self._connected((socket.AF_UNIX, socket.SOCK_STREAM, 0), self._server, deadline_ns)
        parts = urlsplit(self._server)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        failed: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                plain = self._connected((family, kind, protocol), address, deadline_ns)
                return self._encrypted(plain, host, deadline_ns) if parts.scheme == "https" else plain
            except OSError as error:  # of TLS too: another server may have the port at the other address
                failed = error
        raise failed

    def _connected(self, kind: tuple[int, int, int], address: Any, deadline_ns: int) -> _DeadlineSocket:
        connection = _DeadlineSocket(*kind)
        connection.deadline_ns = deadline_ns
        try:
            self._register(connection)
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _encrypted(self, plain: socket.socket, host: str, deadline_ns: int) -> _DeadlineSocket:
        context = ssl.create_default_context()
        context.sslsocket_class = _DeadlineTlsSocket
        encrypted = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        assert isinstance(encrypted, _DeadlineTlsSocket)
        encrypted.deadline_ns = deadline_ns
        try:
            self._register(encrypted)
            encrypted.do_handshake()
        except BaseException:
            encrypted.close()
            raise
        return encrypted

    def _register(self, connection: socket.socket) -> None:
        """Lets `close` end what is done on it."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            self._current = connection

    def _exchange(self, connected: socket.socket, method: str, target: str, headers: dict[str, str]) -> Response:
        parts = urlsplit(self._server)
        port = parts.port or _PORTS.get(parts.scheme)  # without one the last part of an IPv6 address is taken for it
        connection = http.client.HTTPConnection(parts.hostname or "localhost", port)  # for the header Host
        connection.sock = connected
        connection.request(method, target, headers=headers)
        with connection.getresponse() as response:
            if response.status != http.client.OK and not self._read_refusals:
                return Response(response.status, b"")
            body = response.read(self._max_bytes + 1)
            if len(body) > self._max_bytes:
                raise _TooLargeError
            if response.length:
                raise http.client.IncompleteRead(body, response.length)
        return Response(response.status, body)


class _TooLargeError(Exception):
    """The answer is beyond its bound."""


class _DeadlineSocket(socket.socket):
    """A socket on which every operation ends by one deadline, and which receives only so much.

    A plain time-out begins anew with each byte.
    """

    deadline_ns = 0
    left_bytes = _FRAMING_BYTES  # that may yet be received

    def connect(self, address: Any) -> None:
        self._limit()
        super().connect(address)

    def sendall(self, *arguments: Any) -> None:
        self._limit()
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._limit()
        received = super().recv_into(*arguments)
        self.left_bytes -= received
        if self.left_bytes < 0:
            raise _TooLargeError
        return received

    def _limit(self) -> None:
        left_ns = self.deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError
        self.settimeout(left_ns / NS_PER_SECOND)


class _DeadlineTlsSocket(_DeadlineSocket, ssl.SSLSocket):
    """The same over TLS: the methods that it limits are those of ssl.SSLSocket."""

    def do_handshake(self, block: bool = False) -> None:
        self._limit()
        super().do_handshake(block)
