# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's HTTP server, on TCP ports and UNIX sockets: accepts connections and limits them.

One thread accepts; each connection has a thread of its own, in which the TLS handshake takes place too, and is cut off
after its listener's `deadline_seconds`, whatever was received by then. Of each listener MAX_CLIENTS connections may
exist, MAX_OF_ONE_ADDRESS of one address: a newcomer takes the place of the oldest that has not sent a request yet, so
that silent connections shut out neither Prometheus, nor the kubelet, nor an order.

On loopback, where any process has millions of addresses, user and cgroup take the place of the address. The kernel is
asked for the other end's socket (sock_diag(7), inet_diag): its user, and from Linux 5.9 on its cgroup. Where it may not
be asked or does not answer, all of loopback is one client.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

from agent.core.errors import SetupError
from agent.core.worker import Worker
from agent.exporters.web.auth import Guard
from agent.exporters.web.handler import RequestHandler, RequestState, Route, Routes

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

_log = logging.getLogger(__name__)
MAX_CLIENTS: Final = 32  # of one listener
MAX_OF_ONE_ADDRESS: Final = 8  # a browser opens six
MAX_THREADS: Final = 2 * MAX_CLIENTS  # of one listener; those that were cut off have yet to notice
TCP_SECONDS: Final = 30.0  # browsers open connections in advance and send nothing
_CHECK_SECONDS: Final = 0.5  # between two looks at the deadlines
LOOPBACK: Final = "loopback"
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_ALL_STATES: Final = 0xFFFFFFFF
_NO_COOKIE: Final = 0xFFFFFFFF
_CGROUP_ID: Final = 21  # INET_DIAG_CGROUP_ID
_NETLINK_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST: Final = struct.Struct("=BBBxI")  # inet_diag_req_v2 up to its socket
_SOCKET: Final = struct.Struct("=2s2s16s16sIII")  # inet_diag_sockid
_ANSWER: Final = struct.Struct("=BBBB48sIIIII")  # inet_diag_msg: …, uid, inode
_ATTRIBUTE: Final = struct.Struct("=HH")
_NETLINK_SECONDS: Final = 0.1
_MOST_ANSWER_BYTES: Final = 4096


@dataclass(slots=True, eq=False)
class Listener:
    """A listening socket: what is answered on it, to which clients, and within which time."""

    socket: socket.socket
    routes: Routes
    deadline_seconds: float
    guard: Guard = field(default_factory=Guard)

    def close(self) -> None:
        """No connection is accepted any more."""
        self.socket.close()


@dataclass(slots=True, eq=False)
class TcpListener(Listener):
    """A TCP port, with TLS where the guard has it."""

    @property
    def port(self) -> int:
        """The one in use, where port 0 asked for any."""
        return int(self.socket.getsockname()[1])

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ip_address(self._host.partition("%")[0]).is_loopback

    @property
    def url(self) -> str:
        """Scheme, address and port."""
        scheme = "http" if self.guard.terms().context is None else "https"
        return f"{scheme}://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    @property
    def _host(self) -> str:
        return str(self.socket.getsockname()[0])


def listen_on_tcp(
    address: str,
    port: int,
    pages: Mapping[str, WSGIApplication],
    public: Mapping[str, WSGIApplication] = MappingProxyType({}),
    guard: Guard | None = None,
) -> TcpListener:
    """A listener for read-only pages; `public` are those that need no password. SetupError when the port is taken."""
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = _bound(family, place[:2])
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics on {address}:{port} ({error.strerror or error}): "
            "stop what listens there ('ss -ltnp' shows it) or choose another address or port"
        ) from error
    routes = {path: Route(page) for path, page in pages.items()}
    routes |= {path: Route(page, public=True) for path, page in public.items()}
    return TcpListener(listener, routes, TCP_SECONDS, guard or Guard())


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(
            socket.SOMAXCONN
        )  # in a burst each is answered or turned away; else some would retry for seconds
        stack.pop_all()
    return listener


@dataclass(slots=True, eq=False)
class _Client:
    """One connection; past the deadline it is cut off."""

    connection: socket.socket
    listener: Listener
    address: str
    request: RequestState
    is_cut_off: bool = False

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.request.deadline <= now

    def shut_down(self) -> None:
        """Ends what its thread waits for, which then closes the connection."""
        with contextlib.suppress(OSError):  # it has hung up
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)  # of the descriptor, not of TLS


class HttpServer:
    """Serves its listeners until closed.

    `dropped` counts connections that were turned away or cut off, `failed` requests whose route raised.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.dropped = 0
        self.failed = 0
        self._listeners = listeners
        self._mutex = threading.Lock()  # of the clients
        self._failing = threading.Lock()  # of `failed`: of two that fail at once one is the first
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for listener in listeners:
            listener.socket.setblocking(False)
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._worker = Worker("http", self._step, failed="accepting connections")
        self._worker.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving, closes the listeners and cuts off every client."""
        self._worker.stop()
        self._wake.close()  # ends the wait for a connection
        self._worker.close()
        for listener in self._listeners:
            listener.close()
        self._cut_off(math.inf)
        self._selector.close()
        self._woken.close()

    def _step(self) -> float:
        for key, _ in self._selector.select(_CHECK_SECONDS if self._clients else None):
            if key.data is not None:
                self._accept(key.data)
        self._cut_off(time.monotonic())
        return 0.0

    def _accept(self, listener: Listener) -> None:
        try:
            connection, address = listener.socket.accept()
        except OSError:  # the client has hung up already, or no descriptor is left
            self.dropped += 1
            time.sleep(0.01)  # in the latter case it is still queued, and select returns at once
            return
        request = RequestState(time.monotonic() + listener.deadline_seconds)
        client = _Client(connection, listener, client_name(connection, address) if address else "", request)
        try:
            if self._admit(client):
                threading.Thread(target=self._serve, args=(client,), name="http-request", daemon=True).start()
                return
        except RuntimeError:  # no thread is left
            _log.debug("a connection was dropped", exc_info=True)
        self.dropped += 1
        self._forget(client)

    def _admit(self, client: _Client) -> bool:
        """Whether it may stay. The deadline of another one may be moved to now for that."""
        now = time.monotonic()
        with self._mutex:
            others = [one for one in self._clients if one.listener is client.listener]
            if len(others) >= MAX_THREADS or not _make_room(others, client.address, now):
                return False
            self._clients.add(client)
        return True

    def _cut_off(self, now: float) -> None:
        with self._mutex:
            for client in self._clients:
                if client.is_late(now):
                    self.dropped += not client.is_cut_off
                    client.is_cut_off = True
                    client.shut_down()

    def _serve(self, client: _Client) -> None:
        """One connection, on a thread of its own."""
        try:
            self._answer(client)
        except Exception:  # noqa: BLE001  # of one client, which may have left or never have sent anything
            _log.debug("a request was not answered", exc_info=True)
        finally:
            self._forget(client)
        if client.request.failure is not None:
            with self._failing:
                if not self.failed:
                    _log.error("a request failed; further ones are only counted", exc_info=client.request.failure)
                self.failed += 1

    def _answer(self, client: _Client) -> None:
        listener, rules = client.listener, client.listener.guard.terms()
        secured = None
        if rules.context is not None:
            secured = rules.context.wrap_socket(client.connection, server_side=True, do_handshake_on_connect=False)
            client.connection = secured  # wrapping has taken the descriptor away from the accepted socket
            listener.guard.greet(secured, rules)
        RequestHandler(client.connection, listener.routes, listener.guard, rules, client.request)
        if secured is not None:
            secured.settimeout(0)
            with contextlib.suppress(OSError):  # announces the end, and waits for no answer
                secured.unwrap()

    def _forget(self, client: _Client) -> None:
        with self._mutex:
            self._clients.discard(client)
        with contextlib.suppress(OSError):
            client.connection.shutdown(socket.SHUT_WR)
        client.connection.close()


def _make_room(others: Sequence[_Client], address: str, now: float) -> bool:
    """Whether one more of the address may stay; the one that makes room for it is late from now on."""
    staying = sorted((one for one in others if not one.is_late(now)), key=lambda one: one.request.deadline)
    silent = [one for one in staying if not one.request.complete]
    own = [one for one in staying if address and one.address == address]
    if len(own) >= MAX_OF_ONE_ADDRESS:
        candidates = [one for one in own if not one.request.complete]
    elif len(staying) >= MAX_CLIENTS:
        candidates = silent or staying  # a slow reader is no better than a silent client
    else:
        return True
    for oldest in candidates[:1]:
        oldest.request.deadline = now
    return bool(candidates)


def client_name(connection: socket.socket, address: tuple[str, int]) -> str:
    """What the limits of one client count together. `address`: of the other end."""
    known = ip_address(address[0].partition("%")[0])
    mapped = getattr(known, "ipv4_mapped", None)
    if not (mapped or known).is_loopback:
        return address[0]
    try:
        return f"{LOOPBACK} {_owner(connection)}"
    except (OSError, struct.error):
        return LOOPBACK


def _owner(connection: socket.socket) -> str:
    """User and cgroup of the process that has the other end."""
    peer, own = connection.getpeername(), connection.getsockname()
    ends = [socket.inet_pton(connection.family, str(end[0]).partition("%")[0]).ljust(16, b"\0") for end in (peer, own)]
    ports = [int(end[1]).to_bytes(2, "big") for end in (peer, own)]
    asked = _REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    asked += _SOCKET.pack(*ports, *ends, 0, _NO_COOKIE, _NO_COOKIE)
    head = _NETLINK_HEADER.pack(_NETLINK_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_NETLINK_SECONDS)
        kernel.send(head + asked)
        answer = kernel.recv(_MOST_ANSWER_BYTES)
    length, kind, *_ = _NETLINK_HEADER.unpack_from(answer)
    if kind != _SOCK_DIAG_BY_FAMILY:
        raise OSError("the kernel does not know the other end of a connection")
    uid = _ANSWER.unpack_from(answer, _NETLINK_HEADER.size)[-2]
    return f"{uid} {_cgroup(answer[_NETLINK_HEADER.size + _ANSWER.size : length])}"


def _cgroup(attributes: bytes) -> int:
    """0: not reported."""
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _CGROUP_ID:
            return int.from_bytes(attributes[_ATTRIBUTE.size : length], "little")
        attributes = attributes[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    return 0
