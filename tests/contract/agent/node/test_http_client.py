# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The HTTP client against real servers on TCP and UNIX sockets: requests, deadlines, bounds, and closing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError, SourceTimeoutError
from agent.node.http_client import Failure, FetchError, HttpClient
from tools.harness.wait import until

LONG_NS = 60 * NS_PER_SECOND
Address = Callable[[Path], tuple[socket.socket, str]]


def unix(folder: Path) -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen()
    return listener, str(folder / "s")


def tcp(_: Path) -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def served(opened: tuple[socket.socket, str], answer: bytes | None) -> Iterator[list[bytes]]:
    """What one client sends; it gets `answer`, or None, which leaves it waiting until it goes."""
    listener, _ = opened
    received: list[bytes] = []

    def serve() -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(30)
            received.append(connection.recv(65536))
            if answer is None:
                connection.recv(1)
            else:
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield received
        thread.join(30)


@pytest.mark.parametrize("address", [unix, tcp])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_gets_status_and_body(tmp_path: Path, address: Address, method: str) -> None:
    opened = address(tmp_path)
    with served(opened, b"HTTP/1.1 418 Teapot\r\nContent-Length: 5\r\n\r\nshort") as received:
        response = HttpClient(opened[1], 1 << 20).request(method, "/v1/x?y=z", monotonic_ns() + LONG_NS)
    assert (response.status, response.body) == (418, b"short")
    assert received[0].startswith(f"{method} /v1/x?y=z HTTP/1.1\r\nHost: ".encode())


@pytest.mark.parametrize("address", [unix, tcp])
def test_closing_from_another_thread_ends_a_request_that_is_under_way(tmp_path: Path, address: Address) -> None:
    opened = address(tmp_path)
    client = HttpClient(opened[1], 1 << 20)
    with served(opened, None) as received:
        failed: list[SourceError] = []

        def ask() -> None:
            try:
                client.request("GET", "/", monotonic_ns() + LONG_NS)
            except SourceError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: bool(received), "the request")
        client.close()
        asking.join(30)
    assert len(failed) == 1
    with pytest.raises(FetchError, match="closed"):
        client.request("GET", "/", monotonic_ns() + LONG_NS)


@pytest.mark.parametrize("address", [unix, tcp])
def test_a_server_without_an_answer_is_left_at_the_deadline(tmp_path: Path, address: Address) -> None:
    opened = address(tmp_path)
    with served(opened, None), pytest.raises(SourceTimeoutError, match="not answered in time"):
        HttpClient(opened[1], 1 << 20).request("GET", "/", monotonic_ns() + NS_PER_SECOND // 5)


@pytest.mark.parametrize("address", [unix, tcp])
def test_an_answer_that_is_too_long_or_cut_short_is_refused(tmp_path: Path, address: Address) -> None:
    for number, (answer, failure) in enumerate(
        (
            (b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 9, Failure.TOO_LARGE),
            (b"HTTP/1.0 200 OK\r\nContent-Length: 8\r\n\r\nx", Failure.MALFORMED),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        opened = address(folder)
        with served(opened, answer), pytest.raises(FetchError) as caught:
            HttpClient(opened[1], 8).request("GET", "/", monotonic_ns() + LONG_NS)
        assert caught.value.failure is failure


def test_a_socket_that_does_not_exist_is_unreachable_and_its_cause_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FetchError) as caught:
        HttpClient(str(tmp_path / "none"), 8).request("GET", "/", monotonic_ns() + LONG_NS)
    assert caught.value.failure is Failure.UNREACHABLE
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("size", [b"-1", b"-0x1"])
def test_a_chunk_of_negative_length_is_not_read_to_its_end(tmp_path: Path, size: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n"
    opened = unix(tmp_path)
    with served(opened, head + bytes(8 << 20)), pytest.raises(FetchError) as failed:
        HttpClient(opened[1], 1 << 20).request("GET", "/", monotonic_ns() + LONG_NS)
    assert failed.value.failure is Failure.TOO_LARGE
