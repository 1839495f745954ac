# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The service's HTTP: the extender's verbs for kube-scheduler, and pages for people and Prometheus.

Invariant: a client that is slow, sends too much or sends what is no JSON costs a bounded time and amount of memory, and
gets a reason. It listens on the loopback by default: a client that can reach it can have pods bound.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedReader
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from fleet.deadlines import DeadlineReader
from fleet.model import FleetError

LONGEST_BODY: Final = 16 << 20
"""A pod is at most 1.5 MiB, 5,000 names are half a MiB"""
REQUEST_S: Final = 5.0
"""In which a request has to be sent"""
IDLE_S: Final = 120.0
"""For which a kept connection may wait: longer than Go's clients do, so that it is they who close it"""
MOST_CONNECTIONS: Final = 64
_LAST_S: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    text: bytes
    kind: str = "application/json"
    status: int = 200


def json_page(document: Any, status: int = 200) -> Page:
    """One document."""
    return Page(json.dumps(document, allow_nan=False).encode(), status=status)


Verb = Callable[[Any], Any]
"""Document → document"""
View = Callable[[Mapping[str, str]], Page]
"""Query → page"""
Observe = Callable[[str, str, float], None]
"""Verb, outcome, seconds"""


@dataclass(frozen=True, slots=True)
class Routes:
    """What is served."""

    verbs: Mapping[str, Verb]
    """POST"""
    views: Mapping[str, View]
    """GET"""
    observe: Observe


class Server(ThreadingHTTPServer):
    """One thread per connection, at most MOST_CONNECTIONS."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], routes: Routes) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.routes = routes
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._under_way = 0
        self._changed = threading.Condition()
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise FleetError(f"cannot listen on {address[0]}:{address[1]}: {error}; give another address", 3) from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            self.routes.observe("connection", "too many", 0.0)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.warning("a connection ended early", exc_info=True)

    def begin(self) -> None:
        """A request."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """A request."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Takes no more, and waits for requests under way: a binding that has begun is to be ended."""
        self.shutdown()
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, _LAST_S)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "gpuwarden-fleet"
    sys_version = ""
    disable_nagle_algorithm = True
    timeout = IDLE_S
    server: Server

    def setup(self) -> None:
        super().setup()
        self._reader = DeadlineReader(self.connection, time.monotonic() + IDLE_S)
        self._buffered = BufferedReader(self._reader)
        self.rfile = self._buffered

    def handle_one_request(self) -> None:
        """Waits long for a request's first byte, and not long for the rest."""
        self._reader.deadline_s = time.monotonic() + IDLE_S
        try:
            if not self._buffered.peek(1):
                self.close_connection = True
                return
        except OSError:
            self.close_connection = True
            return
        self._reader.deadline_s = time.monotonic() + REQUEST_S
        super().handle_one_request()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        view = self.server.routes.views.get(address.path)
        if view is None:
            self._answer(_failure(404, f"no page {address.path}"))
            return
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        self._answer(self._made(lambda: view(query)))

    def do_POST(self) -> None:
        start_s = time.monotonic()
        name = urlsplit(self.path).path
        verb = self.server.routes.verbs.get(name)
        if verb is None:
            self.close_connection = True
            self._answer(_failure(404, f"no verb {name}"))
            return
        document = self._document()
        page = document if isinstance(document, Page) else self._made(lambda: json_page(verb(document)))
        self._answer(page)
        self.server.routes.observe(name.strip("/"), str(page.status), time.monotonic() - start_s)

    def _document(self) -> Any:
        """The body, or the page that says what is wrong with it."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            self.close_connection = True
            reason = f"at most {LONGEST_BODY} bytes of JSON, with Content-Length"
            return _failure(413 if length.isdecimal() else 411, reason)
        try:
            text = self.rfile.read(int(length))
        except TimeoutError:
            self.close_connection = True
            return _failure(408, f"the body has to be sent in {REQUEST_S:g} s")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            return _failure(400, f"the body is no JSON: {error}")

    def _made(self, make: Callable[[], Page]) -> Page:
        self.server.begin()
        try:
            return make()
        except FleetError as error:
            return _failure(400, str(error))
        except Exception:  # noqa: BLE001  the scheduler needs an answer, and the next request one too
            _log.exception("%s failed", self.path)
            return _failure(500, "the service failed: its log says why")
        finally:
            self.server.end()

    def _answer(self, page: Page) -> None:
        self.connection.settimeout(REQUEST_S)
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.text)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(page.text)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the base class names it
        _log.debug(format, *arguments)


def _failure(status: int, reason: str) -> Page:
    return json_page({"Error": reason}, status)
