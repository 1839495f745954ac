# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's HTTP port: /metrics for Prometheus and whatever else is given, read-only.

A thread per request, which ends with its client's patience or after `PATIENCE_SECONDS`. Anything but GET and HEAD is
refused here, so that nobody who serves a page has to.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from agent.errors import SetupError

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)
PATIENCE_SECONDS: Final = 30.0  # browsers open connections in advance and say nothing
READING: Final = ("GET", "HEAD")
Headers = list[tuple[str, str]]


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing: who scrapes is nobody's news."""


class _Listener(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of one client, who may have left or never have said anything."""
        _log.debug("a request was not answered", exc_info=True)


class Server:
    """Serves until closed; `port` is the one in use (port 0 asks for any)."""

    def __init__(self, listener: WSGIServer) -> None:
        self._listener = listener
        self.port: int = listener.server_port
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
