# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Servers whose every system call is known, and what the HTTP probes count of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agent.probes.abi import LATENCY_BUCKETS
from enforce.signals.http_probe import HttpProbes, WatchedPort
from tests.support.programs.driver import bounds

PATIENCE_SECONDS = 60.0
GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Act = Callable[[socket.socket], object]


@dataclass(slots=True)
class Times:
    """Between which times the requests must lie that the kernel saw: sums over all of them, in ns."""

    asked: int = 0  # before the client wrote
    read: int = 0  # after the server's first read returned
    answering: int = 0  # before the server's last write
    answered: int = 0  # after it

    def hold(self, sum_ns: int) -> bool:
        """Whether so much latency can be true."""
        return self.answering - self.read <= sum_ns <= self.answered - self.asked


@dataclass(slots=True)
class Service:
    """One place of the probes, for one port of one process at a time."""

    probes: HttpProbes
    place: int
    epoch: int
    before: dict[str, int] = field(default_factory=dict)
    statuses: tuple[int, ...] = (1, 2, 3, 4, 5)

    def watch(self, port: int, *tgids: int, path: str = "") -> None:
        """Counts this port of these processes from now on."""
        self.probes.watch(self.place, self.epoch, WatchedPort(port, path, statuses=self.statuses))
        for tgid in tgids or (os.getpid(),):
            self.probes.follow(self.place, self.epoch, tgid)
        self.before = self.probes.tallies()

    def talk(self, serve: Act, ask: Act, family: int = socket.AF_INET, path: str = "") -> None:
        """One connection: both sides to their ends, in this process."""
        with listening(family) as listener:
            self.watch(listener.getsockname()[1], path=path)
            talk(listener, serve, ask)

    @property
    def found(self) -> Any:
        """struct latency."""
        latency = self.probes.latencies(self.place)
        least, most = bounds(latency)
        assert len(latency.buckets) == LATENCY_BUCKETS
        assert sum(latency.buckets) == latency.count
        assert least <= latency.sum_ns <= most
        return latency

    @property
    def tallies(self) -> dict[str, int]:
        """What was counted since `watch`, of what is not 0."""
        now = self.probes.tallies()
        return {name: count - self.before[name] for name, count in now.items() if count != self.before[name]}


@contextmanager
def listening(family: int = socket.AF_INET) -> Iterator[socket.socket]:
    """A listener on a free port."""
    host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
    with socket.create_server((host, 0), family=family, backlog=64) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        yield listener


def talk(listener: socket.socket, serve: Act, ask: Act) -> None:
    """Serves one connection in a thread; both must end without an error."""

    def run() -> None:
        with listener.accept()[0] as connection:
            connection.settimeout(PATIENCE_SECONDS)
            serve(connection)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(run)
        with socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE_SECONDS) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask(client)
        served.result(PATIENCE_SECONDS)


def exactly(connection: socket.socket, data: bytes) -> None:
    """Reads these bytes and no others."""
    got = b""
    while len(got) < len(data):
        part = connection.recv(len(data) - len(got))
        assert part, f"the connection ended after {got!r}"
        got += part
    assert got == data


def once(answer: bytes = OK, request: bytes = GET) -> Act:
    """Serves one request with one read and one write."""

    def serve(connection: socket.socket) -> None:
        exactly(connection, request)
        connection.sendall(answer)

    return serve


def asking(answer: bytes = OK, request: bytes = GET, times: int = 1) -> Act:
    """Sends a request and reads the whole answer, so many times."""

    def ask(client: socket.socket) -> None:
        for _ in range(times):
            client.sendall(request)
            exactly(client, answer)

    return ask
