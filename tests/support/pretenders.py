# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Servers on UNIX sockets that behave as no container runtime should: they hang, drip, and answer without end."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc

Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def listening(path: Path, behave: Behaviour) -> Iterator[list[socket.socket]]:
    """Behaves so to each connection, in a thread of its own. Yields the connections so far."""
    met: list[socket.socket] = []
    threads: list[threading.Thread] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        acceptor = threading.Thread(target=_accept, args=(server, behave, met, threads))
        acceptor.start()
        try:
            yield met
        finally:
            server.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for connected in met:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for connected in met:
                connected.close()
            path.unlink()


def _accept(
    server: socket.socket, behave: Behaviour, met: list[socket.socket], threads: list[threading.Thread]
) -> None:
    with contextlib.suppress(OSError):  # shut down: the test is over
        while True:
            connected, _ = server.accept()
            met.append(connected)
            threads.append(threading.Thread(target=_behave, args=(behave, connected)))
            threads[-1].start()


def _behave(behave: Behaviour, connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side went away
        behave(connected)


def hang(connected: socket.socket) -> None:
    """Reads everything, answers nothing."""
    while connected.recv(1 << 16):
        pass


def answering(answer: bytes) -> Behaviour:
    """Sends this after the first bytes of a request, then ends the connection."""

    def send(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        connected.sendall(answer)
        connected.shutdown(socket.SHUT_WR)

    return send


def endlessly(head: bytes, tail: bytes) -> Behaviour:
    """`head`, and then `tail` again and again."""

    def send(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        connected.sendall(head)
        for _ in itertools.count():
            connected.sendall(tail)

    return send


def dripping(answer: bytes, pause: threading.Event) -> Behaviour:
    """A byte at a time, until `pause` is set: never long enough without one for a plain time limit."""

    def drip(connected: socket.socket) -> None:
        connected.recv(1 << 16)
        for byte in itertools.cycle(answer):
            connected.sendall(bytes([byte]))
            if pause.wait(0.02):
                return

    return drip


def ok(body: bytes) -> bytes:
    """An HTTP answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


Methods = Mapping[str, Callable[[bytes], bytes]]


def _answered(method: Callable[[bytes], bytes], request: bytes, context: grpc.ServicerContext) -> bytes:
    try:
        return method(request)
    except TimeoutError:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        raise


@contextlib.contextmanager
def serving(path: Path, methods: Methods) -> Iterator[None]:
    """A real gRPC server of these methods ("/service/Method"), on bytes; TimeoutError ends a call by its deadline."""

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            method = methods.get(details.method)
            return grpc.unary_unary_rpc_method_handler(partial(_answered, method)) if method else None

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
        path.unlink(missing_ok=True)
