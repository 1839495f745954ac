# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's HTTP port: /metrics for Prometheus and whatever else is given, read-only.

A thread per connection, in which TLS's hands are shaken too. Each is cut off after `PATIENCE_SECONDS`, whatever it has
said by then. `MOST_CLIENTS` may stay, `MOST_OF_ONE` of one address: a newcomer takes the place of the oldest that has
not asked for anything yet, so that who keeps connections and says nothing shuts out neither Prometheus nor the kubelet.
Anything but GET and HEAD is refused here, and so is whom the guard does not let in, so that nobody who serves a page
has to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from socketserver import TCPServer, ThreadingMixIn
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from agent.errors import SetupError
from agent.webconfig.guard import Guard
from agent.webconfig.terms import Terms

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
MOST_CLIENTS: Final = 32
MOST_OF_ONE: Final = 8  # a browser opens six
MOST_THREADS: Final = 2 * MOST_CLIENTS  # those who were cut off have yet to notice
PATIENCE_SECONDS: Final = 30.0  # browsers open connections in advance and say nothing
READING: Final = ("GET", "HEAD")
PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")
Headers = list[tuple[str, str]]


@dataclass(slots=True)
class _Client:
    """Who is connected; past the deadline it is cut off."""

    address: str
    deadline: float
    has_asked: bool = False  # a whole request


class _Handler(WSGIRequestHandler):
    def parse_request(self) -> bool:
        """Reads the rest of the request."""
        whole = super().parse_request()
        if whole:
            cast("_Listener", self.server).note_request(self.connection)
        return whole

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing: who scrapes is nobody's news."""


class _Listener(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    guard = Guard()
    request_queue_size = socket.SOMAXCONN  # in a burst each is answered or refused; else some would try for seconds

    def __init__(self, *arguments: Any) -> None:
        self._mutex = threading.Lock()
        self._clients: dict[socket.socket, _Client] = {}  # of every open connection
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
        """Whether there is room for one more, or can be made. If so, its time begins."""
        address, now = str(client_address[0]), time.monotonic()
        with self._mutex:
            room = len(self._clients) < MOST_THREADS and self._make_room(address, now)
            if room:
                self._clients[request] = _Client(address, now + PATIENCE_SECONDS)
        return room

    def _make_room(self, address: str, now: float) -> bool:
        """Whether one more of the address may stay. Somebody else's time may be over for that."""
        staying = sorted((one for one in self._clients.values() if one.deadline > now), key=lambda one: one.deadline)
        silent = [one for one in staying if not one.has_asked]
        own = [one for one in staying if one.address == address]
        if len(own) >= MOST_OF_ONE:
            candidates = [one for one in own if not one.has_asked]
        elif len(staying) >= MOST_CLIENTS:
            candidates = silent or staying  # who reads its answer slowly is no better than who is silent
        else:
            return True
        for oldest in candidates[:1]:
            oldest.deadline = now
        return bool(candidates)

    def note_request(self, connection: socket.socket) -> None:
        """All of its request is there."""
        with self._mutex:
            if connection in self._clients:
                self._clients[connection].has_asked = True

    def shutdown_request(self, request: Any) -> None:
        """It is over, or there was no room for it."""
        with self._mutex:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """One connection, on its thread: shakes hands where there is TLS, then answers."""
        terms = self.guard.terms()
        if terms.context is None:
            super().finish_request(request, client_address)
            return
        secured = terms.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        self._goes_on_as(request, secured)
        try:
            self.guard.greet(secured, terms)
            super().finish_request(secured, client_address)
            secured.settimeout(0)
            with contextlib.suppress(OSError):  # says that it is over, and waits for no answer
                secured.unwrap()
        finally:
            self.shutdown_request(secured)

    def _goes_on_as(self, request: socket.socket, secured: socket.socket) -> None:
        """Wrapping takes the descriptor away from the one that was accepted; its time stays."""
        with self._mutex:
            self._clients[secured] = self._clients.pop(request)

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
            for connection, client in self._clients.items():
                if client.deadline <= now:
                    with contextlib.suppress(OSError):  # it has hung up
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # of the descriptor, not of TLS

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of one client, who may have left or never have said anything."""
        _log.debug("a request was not answered", exc_info=True)


class Server:
    """Serves until closed; `port` is the one in use (port 0 asks for any), `url` where it is.

    `on_loopback`: whether only this machine can reach it.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self.port: int = listener.server_port
        host = listener.server_name
        self.on_loopback = ip_address(host.partition("%")[0]).is_loopback
        self.guard = listener.guard
        scheme = "http" if listener.guard.terms().context is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        threading.Thread(target=listener.serve_forever, name="web", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and free the port."""
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would look half a second later
        self._listener.shutdown()
        self._listener.server_close()


def serve(
    address: str,
    port: int,
    routes: Mapping[str, WSGIApplication],
    to_all: Mapping[str, WSGIApplication] = MappingProxyType({}),
    guard: Guard | None = None,
) -> Server:
    """Serve each path on threads of their own; `to_all`: those for which nobody needs a password.

    SetupError when the port cannot be had.
    """
    guard = guard or Guard()
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Listener", (_Listener,), {"address_family": family, "guard": guard})
        listener = kind(place[:2], _Handler)
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics on {address}:{port} ({error.strerror or error}): "
            "stop what listens there ('ss -ltnp' shows it) or choose another address or port"
        ) from error
    listener.set_app(_routed(routes, to_all, guard))
    return Server(listener)


def _routed(
    routes: Mapping[str, WSGIApplication], to_all: Mapping[str, WSGIApplication], guard: Guard
) -> WSGIApplication:
    everything = {**routes, **to_all}

    def answered(environ: WSGIEnvironment, terms: Terms) -> tuple[str, Headers, bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        refusal = None if path in to_all else guard.refusal(environ, terms)
        if refusal is not None:
            return refusal.status, [PLAIN, *refusal.headers], refusal.text.encode()
        if method not in READING:
            return "405 Method Not Allowed", [PLAIN, ("Allow", ", ".join(READING))], b"this is read-only\n"
        if path not in everything:
            return "404 Not Found", [PLAIN], f"there is {', '.join(everything)}\n".encode()
        return _answer(everything[path], {**environ, "REQUEST_METHOD": "GET"})

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        terms = guard.terms()
        status, headers, body = answered(environ, terms)
        own = {name.lower() for name, _ in headers}
        also = [(name, value) for name, value in terms.headers if name.lower() not in own]
        start_response(status, [*headers, *also, ("Content-Length", str(len(body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

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
