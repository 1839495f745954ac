# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One page of a workload's, by http or https: a GET with a time limit over all of it and a longest answer.

The other side may be hostile: it may send a byte a second, send for ever, or send us elsewhere. Nothing is followed,
nothing is kept open, and no answer is read beyond its bound.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import SourceError

MOST_BYTES = 4 << 20
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"Connection": "close", "Accept": "text/plain;version=0.0.4", "User-Agent": "gpuwarden"}


class Failure(StrEnum):
    """Why there is nothing to read: a closed set, for it becomes a label."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    TLS = "tls"
    STATUS = "status"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    ABSENT = "absent"  # the page is there, the histogram is not


class FetchError(SourceError):
    """No page, or none that can be read. The message says what to do."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


def fetch(url: str, deadline_ns: int, most_bytes: int = MOST_BYTES) -> str:
    """The page's text. FetchError. Only the look-up of a host's name may take longer than the deadline."""
    try:
        return _exchange(url, deadline_ns, most_bytes)
    except TimeoutError as error:
        raise FetchError(Failure.TIMEOUT, f"{url} was not answered in time; give an address that is quicker") from error
    except ssl.SSLError as error:
        raise FetchError(Failure.TLS, f"{url}: {error}; use a certificate that this machine trusts, or http") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise FetchError(Failure.UNREACHABLE, f"{url}: {reason}; check slo.url and that the service runs") from error
    except (http.client.HTTPException, ValueError) as error:
        what = f"{url} did not answer in HTTP ({error!r:.80}); check slo.url"
        raise FetchError(Failure.MALFORMED, what) from error


def _exchange(url: str, deadline_ns: int, most_bytes: int) -> str:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    connection = http.client.HTTPConnection(host, port)  # names the host in the request; the socket is ours
    with _connected(host, port, parts.scheme == "https", deadline_ns) as connected:
        connection.sock = connected
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=_HEADERS)
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                raise FetchError(Failure.STATUS, _unwanted(url, response))
            body = response.read(most_bytes + 1)
            if response.length and len(body) <= most_bytes:
                raise http.client.IncompleteRead(body, response.length)
    if len(body) > most_bytes:
        raise FetchError(Failure.TOO_LARGE, f"{url} has more than {most_bytes >> 20} MiB; give a smaller page")
    return body.decode("utf-8", "replace")


def _unwanted(url: str, response: http.client.HTTPResponse) -> str:
    said = f"{url} answered with status {response.status}"
    elsewhere = 300 <= response.status < 400
    return f"{said}; " + ("redirects are not followed, give the page's own address" if elsewhere else "check slo.url")


def _connected(host: str, port: int, tls: bool, deadline_ns: int) -> socket.socket:
    failed: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        plain = _Limited(family, kind, protocol)
        try:
            plain.deadline_ns = deadline_ns
            plain.connect(address)
            return _encrypted(plain, host, deadline_ns) if tls else plain
        except OSError as error:
            plain.close()
            failed = error
    raise failed


def _encrypted(plain: socket.socket, host: str, deadline_ns: int) -> socket.socket:
    context = ssl.create_default_context()
    context.sslsocket_class = _LimitedTls
    encrypted = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    try:
        assert isinstance(encrypted, _LimitedTls)
        encrypted.deadline_ns = deadline_ns
        encrypted.settimeout(_left_seconds(deadline_ns))
        encrypted.do_handshake()
    except BaseException:
        encrypted.close()
        raise
    return encrypted


def _left_seconds(deadline_ns: int) -> float:
    left_ns = deadline_ns - monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError
    return left_ns / NS_PER_SECOND


class _Limited(socket.socket):
    """A socket whose every operation ends by one deadline. (A plain time limit starts anew with each byte.)"""

    deadline_ns = 0

    def connect(self, address: Any) -> None:
        self.settimeout(_left_seconds(self.deadline_ns))
        super().connect(address)

    def sendall(self, *arguments: Any) -> None:
        self.settimeout(_left_seconds(self.deadline_ns))
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(_left_seconds(self.deadline_ns))
        return super().recv_into(*arguments)


class _LimitedTls(ssl.SSLSocket):
    """The same, encrypted."""

    deadline_ns = 0

    def sendall(self, *arguments: Any) -> None:
        self.settimeout(_left_seconds(self.deadline_ns))
        super().sendall(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(_left_seconds(self.deadline_ns))
        return super().recv_into(*arguments)
