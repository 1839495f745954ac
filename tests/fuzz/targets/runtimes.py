# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What container runtimes and the kubelet answer: protobuf over gRPC, JSON over HTTP, and HTTP itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from agent.containers.cri import Containerd, Cri
from agent.containers.grpc_channel import GrpcChannel
from agent.containers.identity import Names, applied, bounded
from agent.containers.kubelet import PodResources, holders
from agent.containers.runtimes import Engine, NameSource
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError
from agent.core.model import Container, ContainerKey
from agent.node.http_client import HttpClient, Response, _DeadlineSocket
from tests.fuzz.target import Target, answers, require

_ID: Final = "a" * 64
_CONTAINER: Final = Container(ContainerKey(f"docker:{_ID}"), "a" * 12, "docker", _ID, cgroup="/docker/" + _ID)
_MOST_NAMES_CHARACTERS: Final = 64 << 10  # far more than `bounded` promises
_MOST_BODY_BYTES: Final = 1 << 12


class _Stub:
    """A gRPC channel whose calls are answered with the bytes of an input."""

    def __init__(self, data: bytes) -> None:
        self._following = answers(data)

    def unary_unary(self, _method: str) -> Callable[..., bytes]:
        """A call."""
        return lambda *_arguments, **_options: self._following()

    def close(self) -> None:
        """Nothing is open."""


class _StubChannel(GrpcChannel):
    """The product's channel over such a one."""

    def __init__(self, data: bytes) -> None:
        super().__init__("/run/test.sock")
        self._stub = _Stub(data)

    def _channel(self) -> Any:
        return self._stub


def cri(data: bytes) -> None:
    """Answers of the container runtime interface: a list of containers, one of sandboxes, a status."""
    source = Cri("/run/test.sock")
    source._channel = _StubChannel(data)
    _look_up(source)


def containerd(data: bytes) -> None:
    """Answers of containerd: its namespaces, a container, its task."""
    source = Containerd("/run/test.sock")
    source._channel = _StubChannel(data)
    _look_up(source)


def kubelet(data: bytes) -> None:
    """A list of pods and their devices."""
    source = PodResources("/run/test.sock")
    source._channel = _StubChannel(data)
    with suppress(SourceError):
        for usage in holders(source.list(_deadline_ns())):
            require(usage.container.name.isprintable(), "a name moves the cursor")


class _StubHttp(HttpClient):
    """Answers with a body."""

    def __init__(self, body: bytes) -> None:
        super().__init__("/run/test.sock", len(body))
        self._body = body

    def request(self, method: str, target: str, deadline_ns: int, headers: dict[str, str] | None = None) -> Response:
        return Response(200, self._body)


def docker(data: bytes) -> None:
    """The body of Docker's or Podman's answer about a container."""
    source = Engine("/run/test.sock")
    source._http = _StubHttp(data)
    _look_up(source)


class _SocketClient(HttpClient):
    """The product's HTTP client on a connection that has received an input."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__("http://test", _MOST_BODY_BYTES)
        self._opened = _DeadlineSocket(fileno=connected.detach())

    def _connect(self, deadline_ns: int) -> _DeadlineSocket:
        self._opened.deadline_ns = deadline_ns
        return self._opened


def http_answer(data: bytes) -> None:
    """Status line, headers and body of a server's answer, which may be a tenant's page of metrics."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with suppress(BlockingIOError):
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(SourceError):
            answer = _SocketClient(ours).request("GET", "/metrics", _deadline_ns())
            require(len(answer.body) <= _MOST_BODY_BYTES, "the body is beyond its bound")


def _deadline_ns() -> int:
    return monotonic_ns() + 60 * NS_PER_SECOND


def _look_up(source: NameSource) -> None:
    """As the naming thread does, to what is exported."""
    with suppress(SourceError):
        names = source.look_up(_CONTAINER, _deadline_ns())
        if names is not None:
            _require_fit(bounded(names))


def _require_fit(names: Names) -> None:
    named = applied(names, _CONTAINER)
    maps = (named.labels, named.annotations)
    texts = [named.name, named.pod or "", named.namespace or "", named.image or ""]
    texts += [text for one in maps for pair in one.items() for text in pair]
    require(all(text.isprintable() for text in texts), "a name moves the cursor")
    require(sum(map(len, texts)) < _MOST_NAMES_CHARACTERS, "names without bounds")
    require(names.tgid is None or type(names.tgid) is int, "the first process is no number")
    json.dumps([texts, names.tgid]).encode()


TARGETS: Final = {
    "cri": Target("answers of CRI", cri, 1 << 20),
    "containerd": Target("answers of containerd", containerd, 1 << 20),
    "kubelet": Target("answers of the kubelet", kubelet, 8 << 20),
    "docker": Target("answers of Docker and Podman", docker),
    "http_answer": Target("answers in HTTP", http_answer),
}
