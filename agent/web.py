# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's HTTP port: /metrics for Prometheus and whatever else is given, read-only.

A thread per connection, `MOST_CLIENTS` at most, each cut off after `PATIENCE_SECONDS` whatever it has said by then.
Anything but GET and HEAD is refused here, so that nobody who serves a page has to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from agent.errors import SetupError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
MOST_CLIENTS: Final = 32
PATIENCE_SECONDS: Final = 30.0  # browsers open connections in advance and say nothing
READING: Final = ("GET", "HEAD")
Headers = list[tuple[str, str]]


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing: who scrapes is nobody's news."""


class _Listener(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN  # in a burst each is answered or refused; else some would try for seconds

    def __init__(self, *arguments: Any) -> None:
        self._mutex = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}  # of every open connection
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without the base class's question for our full name, which is as slow as the resolver."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        try:
            return super().get_request()
        except OSError:  # the client has hung up already, or we are out of descriptors
            time.sleep(0.01)  # in the latter case it is still queued, and select returns at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more. If so, its time begins."""
        with self._mutex:
            room = len(self._deadlines) < MOST_CLIENTS
            if room:
                self._deadlines[request] = time.monotonic() + PATIENCE_SECONDS
        return room

    def shutdown_request(self, request: Any) -> None:
        """It is over, or there was no room for it."""
        with self._mutex:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every half second, and after each connection."""
        self._cut_off(time.monotonic())

    def server_close(self) -> None:
        """Nobody is listened to any more."""
        super().server_close()
        self._cut_off(math.inf)

    def _cut_off(self, now: float) -> None:
        """Ends what those who are past their deadline wait for; their threads close the connections."""
        with self._mutex:
            for connection, deadline in self._deadlines.items():
                if deadline <= now:
                    with contextlib.suppress(OSError):  # it has hung up
                        connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of one client, who may have left or never have said anything."""
        _log.debug("a request was not answered", exc_info=True)


class Server:
    """Serves until closed; `port` is the one in use (port 0 asks for any), `url` where it is."""

    def __init__(self, listener: WSGIServer) -> None:
        self._listener = listener
        self.port: int = listener.server_port
        host = listener.server_name
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        threading.Thread(target=listener.serve_forever, name="web", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._listener.shutdown()
        self._listener.server_close()


def serve(address: str, port: int, routes: Mapping[str, WSGIApplication]) -> Server:
    """Serve each path on threads of their own. SetupError when the port cannot be had."""
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Listener", (_Listener,), {"address_family": family})
        listener = kind(place[:2], _Handler)
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics on {address}:{port} ({error.strerror or error}): "
            "stop what listens there ('ss -ltnp' shows it) or choose another address or port"
        ) from error
    listener.set_app(_routed(routes))
    return Server(listener)


def _routed(routes: Mapping[str, WSGIApplication]) -> WSGIApplication:
    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, route = environ["REQUEST_METHOD"], routes.get(environ["PATH_INFO"])
        plain = ("Content-Type", "text/plain; charset=utf-8")
        if method not in READING:
            start_response("405 Method Not Allowed", [plain, ("Allow", ", ".join(READING))])
            return [b"this is read-only\n"]
        if route is None:
            start_response("404 Not Found", [plain])
            return [f"there is {', '.join(routes)}\n".encode()]
        status, headers, body = _answer(route, {**environ, "REQUEST_METHOD": "GET"})
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body] if method == "GET" else []

    return application


def _answer(route: WSGIApplication, environ: WSGIEnvironment) -> tuple[str, Headers, bytes]:
    """Whole, so that its length is known whether the body is wanted or not."""
    parts: list[bytes] = []
    begun: list[tuple[str, Headers]] = []

    def start(status: str, headers: Headers, _error: object = None, /) -> Callable[[bytes], object]:
        begun[:] = [(status, headers)]
        return parts.append

    parts += route(environ, start)
    ((status, headers),) = begun
    return status, headers, b"".join(parts)
