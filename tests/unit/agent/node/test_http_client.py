# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What one HTTP request sends, and what of an answer it waits for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.node.http_client import Failure, FetchError, HttpClient, fetch


class Peer:
    """A server that sends `answer` and keeps the connection open until closed."""

    def __init__(self, path: Path) -> None:
        self.answer, self.request = b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.found = (socket.AF_UNIX, socket.SOCK_STREAM, 0, "", str(path))  # as getaddrinfo has it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self.request = connection.recv(65536)
            connection.sendall(self.answer)
            self._closing.wait(10)


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """Every host name leads to it."""
    peer = Peer(tmp_path / "s")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: [peer.found])
    yield peer
    peer.close()


@pytest.mark.parametrize(
    ("server", "host"),
    [
        ("http://[fe80::abcd]", "[fe80::abcd]"),
        ("http://[2001:db8::1]", "[2001:db8::1]"),
        ("http://[::1]:9000", "[::1]:9000"),
        ("http://chat", "chat"),
        ("http://chat:80", "chat"),
        ("http://chat:8000", "chat:8000"),
    ],
)
def test_the_header_host_is_the_servers_address(peer: Peer, server: str, host: str) -> None:
    HttpClient(server, 1 << 20).request("GET", "/metrics", monotonic_ns() + 10 * NS_PER_SECOND)
    assert f"\r\nHost: {host}\r\n".encode() in peer.request


@pytest.mark.parametrize("body", [b"Content-Length: 10\r\n\r\n", b"\r\n", b"Content-Length: 99\r\n\r\n" + b"x" * 99])
def test_the_status_of_a_refused_page_counts_whatever_its_body_is(peer: Peer, body: bytes) -> None:
    peer.answer = b"HTTP/1.0 503 Service Unavailable\r\n" + body
    with pytest.raises(FetchError, match=r"status 503; check slo\.url") as caught:
        fetch("http://chat/metrics", monotonic_ns() + NS_PER_SECOND // 2, max_bytes=10)
    assert caught.value.failure == Failure.STATUS


def test_a_host_is_asked_at_its_next_address_when_one_does_not_speak_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Peer(tmp_path / "1"), Peer(tmp_path / "2")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: [first.found, second.found])
    with closing(first), closing(second), pytest.raises(FetchError) as caught:
        HttpClient("https://localhost:8000", 1 << 20).request("GET", "/", monotonic_ns() + 10 * NS_PER_SECOND)
    assert caught.value.failure == Failure.TLS
    assert (first.request[:1], second.request[:1]) == (b"\x16", b"\x16")  # a handshake
