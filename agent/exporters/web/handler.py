# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One HTTP request: read within bounds, checked, and answered by the route of its path.

HTTP/1.0, one request per connection. Pages are WSGI applications, which are called for GET and HEAD alone; an order is
a POST that another thread carries out. Invariants: whatever is refused gets a status and one line of text that says
what to do; a client that the guard refuses reaches no route; at most MAX_REQUEST_BYTES of a request are read.

`OwnNames` has the names by which a page on the TCP port may be asked for. A page from elsewhere whose name was made to
point here (DNS rebinding) could read the answer otherwise: its requests carry that name. An address is never such a
name.
"""

from __future__ import annotations

import io
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes, urlsplit

from agent.exporters.web.auth import AccessRules, Guard

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

MAX_REQUEST_BYTES: Final = 16 << 10
ORDER_SECONDS: Final = 300.0  # for an order to be carried out: what is held is released first
PLAIN: Final = ("Content-Type", "text/plain; charset=utf-8")
MISDIRECTED: Final = "421 Misdirected Request"  # by another name than one of OwnNames
_HANG_UP_CHECK_SECONDS: Final = 0.2
_HUNG_UP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and headers; Content-Length, Date and those of the web configuration are added."""

    status: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = (PLAIN,)

    @classmethod
    def refusal(cls, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> Answer:
        """One line of text."""
        return cls(f"{status.value} {status.phrase}", f"{text}\n".encode(), (PLAIN, *headers))


Reply = Callable[[Answer], None]
Order = Callable[[Reply], None]  # returns at once; calls its argument once, later, on any thread


@dataclass(frozen=True, slots=True)
class Route:
    """What answers one path. `public`: without a password. A path "/name/*" is for everything below /name/."""

    page: WSGIApplication | None = None
    order: Order | None = None
    public: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """For the header Allow."""
        return ("GET", "HEAD") * (self.page is not None) + ("POST",) * (self.order is not None)


Routes = Mapping[str, Route]


@dataclass(slots=True)
class RequestState:
    """What the server knows of one client's request; the handler writes, the server reads."""

    deadline: float
    complete: bool = False  # the request was received as a whole
    failure: Exception | None = None  # what its route raised


class _TooLongError(Exception):
    """More than MAX_REQUEST_BYTES."""


class _BoundedInput(io.BufferedReader):
    """The lines of a request line and its headers."""

    left = MAX_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise _TooLongError
        return line


class RequestHandler(BaseHTTPRequestHandler):
    """Answers the one request of a connection; the constructor returns when that is done."""

    command = ""

    def __init__(
        self, connection: socket.socket, routes: Routes, guard: Guard, rules: AccessRules, state: RequestState
    ) -> None:
        self._routes, self._guard, self._rules, self._state = routes, guard, rules, state
        super().__init__(connection, ("", 0), None)  # type: ignore[arg-type]  # neither address nor server is used

    def setup(self) -> None:
        """Bounds what is read."""
        super().setup()
        assert isinstance(self.rfile, io.BufferedReader)
        self.rfile = _BoundedInput(self.rfile.detach())

    def handle(self) -> None:
        """Reads the request and answers it."""
        try:
            self.raw_requestline = self.rfile.readline()
            if not self.raw_requestline or not self.parse_request():  # it has hung up, or got its refusal
                return
        except _TooLongError:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
            return
        self._state.complete = True
        answer = self._answer(self._environ())
        if answer is not None:
            self._send(answer)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses what could not be read as a request."""
        self.request_version = "HTTP/1.0"  # else the status line is left out
        status = HTTPStatus(code)
        self._send(Answer.refusal(status, f"{message or status.phrase:.200}: ask in HTTP/1.0 or HTTP/1.1"))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Requests are not logged."""

    def _environ(self) -> WSGIEnvironment:
        path, _, query = self.path.partition("?")
        environ: WSGIEnvironment = {
            "REQUEST_METHOD": self.command,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path.encode("latin-1")).decode("latin-1"),  # as WSGI has it
            "QUERY_STRING": query,
        }
        for name, value in self.headers.items():
            key = f"HTTP_{name.upper().replace('-', '_')}"
            environ[key] = f"{environ[key]},{value.strip()}" if key in environ else value.strip()
        return environ

    def _answer(self, environ: WSGIEnvironment) -> Answer | None:
        """None: the client has hung up meanwhile."""
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        route = _find(self._routes, path)
        if route is None or not route.public:
            refusal = self._guard.refusal(environ, self._rules)
            if refusal is not None:
                return Answer(refusal.status, refusal.text.encode(), (PLAIN, *refusal.headers))
        if route is None:
            return Answer.refusal(HTTPStatus.NOT_FOUND, f"unknown path; there is {', '.join(self._routes)}")
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            return Answer.refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"use {allowed}", ("Allow", allowed))
        try:
            if method == "POST":
                assert route.order is not None
                return self._carry_out(route.order)
            assert route.page is not None
            return _call(route.page, {**environ, "REQUEST_METHOD": "GET"})
        except Exception as error:  # noqa: BLE001  # other requests are still answered
            self._state.failure = error
            return Answer.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error: see the agent's log")

    def _carry_out(self, order: Order) -> Answer | None:
        """Waits for the order's answer. None: the client hung up first, or was cut off."""
        answered = threading.Event()
        answers: list[Answer] = []

        def reply(answer: Answer) -> None:
            answers.append(answer)
            answered.set()

        left_seconds = self._state.deadline - time.monotonic()
        self._state.deadline += ORDER_SECONDS
        poll = select.poll()
        poll.register(self.connection, _HUNG_UP)
        order(reply)
        while not answered.wait(_HANG_UP_CHECK_SECONDS):
            if poll.poll(0):
                return None
        self._state.deadline = time.monotonic() + left_seconds
        return answers[0]

    def _send(self, answer: Answer) -> None:
        code, _, phrase = answer.status.partition(" ")
        self.send_response_only(int(code), phrase)
        own = {name.lower() for name, _ in answer.headers}
        also = [(name, value) for name, value in self._rules.headers if name.lower() not in own]
        for name, value in (*answer.headers, *also):
            self.send_header(name, value)
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _find(routes: Routes, path: str) -> Route | None:
    if path in routes:
        return routes[path]
    for pattern, route in routes.items():
        if pattern.endswith("/*") and path.startswith(pattern[:-1]) and len(path) >= len(pattern):
            return route
    return None


def _call(page: WSGIApplication, environ: WSGIEnvironment) -> Answer:
    """The page as a whole, so that its length is known for HEAD too."""
    parts: list[bytes] = []
    started: list[tuple[str, Headers]] = []

    def start(status: str, headers: Headers, _error: object = None, /) -> Callable[[bytes], object]:
        started[:] = [(status, headers)]
        return parts.append

    parts += page(environ, start)
    ((status, headers),) = started
    return Answer(status, b"".join(parts), tuple(headers))


class OwnNames:
    """Addresses, localhost, the machine's name with and without its domain, and those given."""

    def __init__(self, also: Iterable[str] = ()) -> None:
        self.machine = socket.gethostname()
        own = self.machine.lower()
        self._names = {"localhost", own, own.partition(".")[0], *(name.lower().rstrip(".") for name in also)}

    def has(self, host: str) -> bool:
        """Whether a Host header, with or without a port, is one of them."""
        try:
            name = (urlsplit("//" + host).hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._names or _is_address(name)

    def guarded(self, page: WSGIApplication) -> WSGIApplication:
        """The page, for requests by these names, and for those without any: browsers always send one."""

        def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if self.has(environ.get("HTTP_HOST", "localhost")):
                return page(environ, start_response)
            start_response(MISDIRECTED, [PLAIN])
            text = f"ask for this page by address, as localhost, as {self.machine}, or by a name given with --web-host"
            return [f"{text}\n".encode()]

        return serve


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
