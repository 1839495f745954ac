# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Servers of the usual kinds, each a program of its own: `python -m tests.kernel.signals.http_servers KIND [SECONDS]`.

Prints its port, and serves from the first line on its stdin to its end. Each request takes so many seconds on purpose.
"""

from __future__ import annotations

import os
import select
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY = b"x" * 5000
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY)


class Handler(BaseHTTPRequestHandler):
    """HTTP/1.1 with keep-alive; the body goes out in fifty writes."""

    protocol_version = "HTTP/1.1"
    delay_seconds = 0.0

    def do_GET(self) -> None:
        """Any path."""
        time.sleep(self.delay_seconds)  # the latency that the probes measure
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        for at in range(0, len(BODY), 100):
            self.wfile.write(BODY[at : at + 100])

    def do_POST(self) -> None:
        """Reads the body first."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class Forking(socketserver.ForkingMixIn, socketserver.TCPServer):
    """A process per connection."""

    request_queue_size = 64
    max_children = 64


def _serve_epoll(listener: socket.socket, delay_seconds: float) -> None:
    """One thread, no blocking calls; heads and bodies by writev, each as much as the socket takes."""
    listener.setblocking(False)
    poll = select.epoll()
    poll.register(listener.fileno(), select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    asked: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                try:
                    client = listener.accept()[0]
                except BlockingIOError:
                    continue  # another worker has it
                client.setblocking(False)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
                clients[client.fileno()], asked[client.fileno()], waiting[client.fileno()] = client, b"", b""
                poll.register(client.fileno(), select.EPOLLIN)
            elif waiting[fd]:
                waiting[fd] = _write_some(fd, waiting[fd])
            elif got := os.read(fd, 7):
                asked[fd] += got
                if b"\r\n\r\n" in asked[fd]:
                    time.sleep(delay_seconds)
                    asked[fd], waiting[fd] = asked[fd].partition(b"\r\n\r\n")[2], _write_some(fd, _HEAD + BODY)
            else:
                poll.unregister(fd)
                clients.pop(fd).close()
                continue
            if fd in clients:
                poll.modify(fd, select.EPOLLOUT if waiting[fd] else select.EPOLLIN)


def _write_some(fd: int, data: bytes) -> bytes:
    """The rest."""
    try:
        return data[os.writev(fd, [data[:11], data[11:600], data[600:]]) :]
    except BlockingIOError:
        return data


def _epoll(delay_seconds: float) -> tuple[int, Callable[[], None]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    return listener.getsockname()[1], lambda: _serve_epoll(listener, delay_seconds)


def _prefork(delay_seconds: float) -> tuple[int, Callable[[], None]]:
    """Workers that inherit the listening socket."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def serve() -> None:
        for _ in range(3):
            if os.fork() == 0:
                threading.Thread(target=_serve_epoll, args=(listener, delay_seconds), daemon=True).start()
                _outlive_parent()
                os._exit(0)
        threading.Event().wait()

    return listener.getsockname()[1], serve


def _outlive_parent() -> None:
    """Returns when this process's parent has ended."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.1)


def _of(server: socketserver.TCPServer) -> tuple[int, Callable[[], None]]:
    return server.server_address[1], server.serve_forever


KINDS: dict[str, Callable[[float], tuple[int, Callable[[], None]]]] = {
    "threads": lambda _: _of(ThreadingHTTPServer(("127.0.0.1", 0), Handler)),
    "forks": lambda _: _of(Forking(("127.0.0.1", 0), Handler)),
    "epoll": _epoll,
    "prefork": _prefork,
}


def main() -> None:
    """See the module."""
    Handler.delay_seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    port, serve = KINDS[sys.argv[1]](Handler.delay_seconds)
    print(port, flush=True)
    sys.stdin.readline()
    threading.Thread(target=serve, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
