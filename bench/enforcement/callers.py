# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Clients of the online service over HTTP, for the signal that reads there: `python -m bench.enforcement.callers PORT`.

Open loop: a request leaves when it is due, on a connection that is free or a new one, whichever still wait. Each says
when it was due, and its latency counts from there: also where this program is late, or more requests are under way than
the service takes connections.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError
from tools.harness.stage import Cpus

_REQUEST: Final = b"GET /infer HTTP/1.1\r\nHost: service\r\nX-Due-Ns: %d\r\n\r\n"  # sim/workloads/http.c
_END: Final = b"}\n"  # of each answer's body
_AT_FIRST: Final = 16
_MOST: Final = 200
_ROOT: Final = Path(__file__).resolve().parents[2]


@contextmanager
def calling(arrivals: Sequence[float], port: int, folder: Path, cpus: Cpus) -> Iterator[None]:
    """Requests come in for as long as the block lasts, the first one now."""
    due = "".join(f"{at:.9f}\n" for at in arrivals)
    command = [sys.executable, "-m", "bench.enforcement.callers", str(port)]
    (folder / "due").write_text(due)
    with (folder / "due").open() as stdin:
        process = subprocess.Popen(command, cwd=_ROOT, stdin=stdin, stderr=subprocess.PIPE)
    cpus.bind(process.pid, online=True)
    try:
        yield
        if process.poll():
            raise SetupError(f"the clients of the online service failed: {process.communicate()[1].decode()[-500:]}")
    finally:
        process.kill()
        process.communicate()


class Callers:
    """Keep-alive connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.SelectSelector()  # epoll would wait for whole milliseconds
        self._free: deque[socket.socket] = deque()
        self._partial: dict[socket.socket, bytes] = {}
        for _ in range(_AT_FIRST):
            self._free.append(self._connection())

    def call(self, due_ns: int) -> bool:
        """Sends one request, which was due then by the monotonic clock; False when no connection is to be had."""
        if not self._free:
            if len(self._partial) >= _MOST:
                return False
            self._free.append(self._connection())
        self._free.popleft().sendall(_REQUEST % due_ns)
        return True

    def listen(self, seconds: float) -> None:
        """Reads answers, for so long at most."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            got = connection.recv(65536)
            if not got:
                raise SystemExit("the service closed a connection")
            self._partial[connection] += got
            if self._partial[connection].endswith(_END):
                self._partial[connection] = b""
                self._free.append(connection)

    @property
    def waiting(self) -> bool:
        """Whether an answer is still to come."""
        return len(self._free) < len(self._partial)

    def _connection(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ)
        self._partial[connection] = b""
        return connection


def call_all(callers: Callers, arrivals: Sequence[float]) -> None:
    """Sends each request when it is due, and reads every answer."""
    begun_ns = time.monotonic_ns()
    for due_ns in (begun_ns + round(at * NS_PER_SECOND) for at in arrivals):
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            callers.listen(left_ns / NS_PER_SECOND)
        while not callers.call(due_ns):
            callers.listen(1.0)
    while callers.waiting:
        callers.listen(1.0)


if __name__ == "__main__":
    call_all(Callers(int(sys.argv[1])), [float(line) for line in sys.stdin])
