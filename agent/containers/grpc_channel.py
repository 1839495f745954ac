# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Unary gRPC calls on a UNIX socket, one at a time, each with a time limit and a longest answer.

A call is a POST of HTTP/2 whose body is one message behind five bytes, and whose status comes in the trailers
(gRPC over HTTP2, PROTOCOL-HTTP2.md), so `h2` is enough: grpcio, of which nothing else would be used, takes 13 MiB more
memory on every node and 19 MB of disk. The connection is kept while it works, dropped when a call fails, and made anew
where the server has closed it meanwhile: a runtime that was restarted is found again by the next call.

The messages are tables of the fields that are read. One table serves all versions whose numbers agree: CRI v1 and
v1alpha2, podresources v1 and v1alpha1. Numbers: api.proto of k8s.io/cri-api and k8s.io/kubelet, containerd's
api/services.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf.message import DecodeError
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError, SourceTimeoutError
from agent.core.protobuf import MAP, Fields, message_classes

_MESSAGES: Final[dict[str, Fields]] = {
    "Empty": (),
    # runtime.v1.RuntimeService
    "ContainerFilter": ((1, "id", "string"),),
    "ListContainersRequest": ((1, "filter", "ContainerFilter"),),
    "ListContainersResponse": ((1, "containers", "*CriContainer"),),
    "CriContainer": (
        (1, "id", "string"),
        (2, "pod_sandbox_id", "string"),
        (3, "metadata", "ContainerMetadata"),
        (4, "image", "ImageSpec"),
        (8, "labels", MAP),
    ),
    "ContainerMetadata": ((1, "name", "string"),),
    "ImageSpec": ((1, "image", "string"),),
    "ContainerStatusRequest": ((1, "container_id", "string"), (2, "verbose", "bool")),
    "ContainerStatusResponse": ((1, "status", "ContainerStatus"), (2, "info", MAP)),
    "ContainerStatus": ((1, "id", "string"), (8, "image", "ImageSpec")),
    "PodSandboxFilter": ((1, "id", "string"),),
    "ListPodSandboxRequest": ((1, "filter", "PodSandboxFilter"),),
    "ListPodSandboxResponse": ((1, "items", "*PodSandbox"),),
    "PodSandbox": (
        (1, "id", "string"),
        (2, "metadata", "PodSandboxMetadata"),
        (5, "labels", MAP),
        (6, "annotations", MAP),
    ),
    "PodSandboxMetadata": ((1, "name", "string"), (2, "uid", "string"), (3, "namespace", "string")),
    # containerd.services.namespaces.v1.Namespaces, containerd.services.containers.v1.Containers
    "ListNamespacesResponse": ((1, "namespaces", "*Namespace"),),
    "Namespace": ((1, "name", "string"),),
    "GetContainerRequest": ((1, "id", "string"),),
    "GetContainerResponse": ((1, "container", "ContainerdContainer"),),
    "ContainerdContainer": ((1, "id", "string"), (2, "labels", MAP), (3, "image", "string")),
    # containerd.services.tasks.v1.Tasks
    "GetTaskRequest": ((1, "container_id", "string"),),
    "GetTaskResponse": ((1, "process", "TaskProcess"),),
    "TaskProcess": ((3, "pid", "uint64"),),
    # v1.PodResourcesLister
    "ListPodResourcesResponse": ((1, "pod_resources", "*PodResources"),),
    "PodResources": ((1, "name", "string"), (2, "namespace", "string"), (3, "containers", "*ContainerResources")),
    "ContainerResources": ((1, "name", "string"), (2, "devices", "*ContainerDevices")),
    "ContainerDevices": ((1, "resource_name", "string"), (2, "device_ids", "*string")),
}


_CLASSES: Final = message_classes("gpuwarden", _MESSAGES)


def message(name: str) -> Any:
    """The class of that message."""
    return _CLASSES[name]


MOST_BYTES = 1 << 20  # of an answer


class _Code(IntEnum):
    """Statuses of gRPC (google/rpc/code.proto)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_HEAD: Final = struct.Struct(">?I")  # before a message: whether it is compressed, and its length
_CHUNK: Final = 1 << 16
_GRACE_SECONDS: Final = 1.0
_MOST_SHOWN: Final = 200  # characters of what a server says of its failure


class UnansweredError(SourceError):
    """The server answered with a status that is neither success nor failure for us: see `code`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # "NOT_FOUND" | "UNIMPLEMENTED"


class GrpcChannel:
    """One socket. `close` may come from any thread and ends a call that is under way."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._calling = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._open: _Connection | None = None
        self._closed = False

    def call(
        self, method: str, request: Any, answer: str, deadline_ns: int, metadata: Sequence[tuple[str, str]] = ()
    ) -> Any:
        """The answer to `method` ("/package.Service/Method"), a message of that name. UnansweredError, SourceError."""
        what = f"{self._path}: {method}"
        try:
            with self._calling:
                connection = self._connection(deadline_ns)
                reply = connection.post(method, request.SerializeToString(), metadata, deadline_ns)
            return self._parsed(reply, answer)
        except UnansweredError as error:
            raise UnansweredError(f"{what}: {error}", error.code) from error
        except TimeoutError as error:
            self._drop()
            raise SourceTimeoutError(f"{what}: no answer in time") from error
        except (OSError, H2Error, DecodeError, SourceError) as error:
            self._drop()
            raise SourceError(f"{what}: {'closed' if self._closed else error}") from error

    def close(self) -> None:
        """Ends a call that is under way; no further one can be made."""
        with self._lock:
            self._closed = True
        self._drop()

    def _connection(self, deadline_ns: int) -> _Connection:
        """The one that is open, if the server has not closed it; else a new one."""
        with self._lock:
            kept = self._open
        if kept is not None and kept.is_usable():
            return kept
        self._drop()
        made = _Connection(self._most_bytes)
        with self._lock:
            if self._closed:
                made.close()
                raise SourceError("closed")
            self._open = made
        made.begin(self._path, deadline_ns)
        return made

    def _drop(self) -> None:
        with self._lock:
            connection, self._open = self._open, None
        if connection is not None:
            connection.close()

    def _parsed(self, reply: _Reply, answer: str) -> Any:
        """The message of that name. UnansweredError, TimeoutError, SourceError, DecodeError."""
        code = reply.code()
        if code in ("NOT_FOUND", "UNIMPLEMENTED"):
            raise UnansweredError(code, code)
        if code == "DEADLINE_EXCEEDED":
            raise TimeoutError
        if code != "OK":
            raise SourceError(f"{code}: {unquote(reply.headers.get('grpc-message', ''))[:_MOST_SHOWN]}")
        return message(answer).FromString(reply.message())


@dataclass(slots=True)
class _Reply:
    """What has come of an answer so far."""

    headers: dict[str, str] = field(default_factory=dict)  # trailers too
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def code(self) -> str:
        """Its status by name. SourceError: it is no answer of gRPC."""
        if self.headers.get(":status") != "200":
            raise SourceError(f"answered with the HTTP status {self.headers.get(':status')}")
        try:
            return _Code(int(self.headers["grpc-status"])).name
        except (KeyError, ValueError) as error:
            raise SourceError(f"answered with the gRPC status {self.headers.get('grpc-status')!r}") from error

    def message(self) -> bytes:
        """The one message in the body. SourceError."""
        if len(self.body) < _HEAD.size:
            raise SourceError("answered without a message")
        compressed, length = _HEAD.unpack_from(self.body)
        if compressed or length != len(self.body) - _HEAD.size:
            raise SourceError("answered with something else than one plain message")
        return bytes(self.body[_HEAD.size :])


class _Connection:
    """HTTP/2 to the server, on one thread at a time but for `close`. Raises OSError, H2Error, SourceError."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._http = H2Connection(H2Configuration(client_side=True))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._going_away = False

    def begin(self, path: str, deadline_ns: int) -> None:
        """Connects."""
        self._socket.settimeout(_left_seconds(deadline_ns))
        self._socket.connect(path)
        self._http.initiate_connection()
        self._send(_left_seconds(deadline_ns))

    def close(self) -> None:
        """A call that is under way on another thread fails."""
        with suppress(OSError):  # it was not connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def is_usable(self) -> bool:
        """Whether the server has neither closed it nor said that it will, as far as was received."""
        try:
            while True:
                self._receive(_Reply(), seconds=0)
        except BlockingIOError:
            return not self._going_away
        except (OSError, H2Error, SourceError):
            return False

    def post(self, method: str, body: bytes, metadata: Sequence[tuple[str, str]], deadline_ns: int) -> _Reply:
        """The whole answer."""
        stream = self._http.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),  # Go's servers refuse a path
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            # Later than ours: a server that gives up first breaks off, which reads as an error.
            ("grpc-timeout", f"{round((_left_seconds(deadline_ns) + _GRACE_SECONDS) * 1e3)}m"),
            *metadata,
        ]
        self._http.send_headers(stream, headers)
        self._http.send_data(stream, _HEAD.pack(False, len(body)) + body, end_stream=True)
        self._send(_left_seconds(deadline_ns))
        reply = _Reply()
        while not reply.ended:
            self._receive(reply, _left_seconds(deadline_ns))
        return reply

    def _send(self, seconds: float) -> None:
        self._socket.settimeout(seconds)
        self._socket.sendall(self._http.data_to_send())

    def _receive(self, reply: _Reply, seconds: float) -> None:
        """What is next; waits for it. BlockingIOError: in 0 s there is nothing."""
        self._socket.settimeout(seconds)
        received = self._socket.recv(_CHUNK)
        if not received:
            raise SourceError("the server closed the connection")
        for event in self._http.receive_data(received):
            self._take(event, reply)
        self._send(seconds)

    def _take(self, event: events.Event, reply: _Reply) -> None:
        match event:
            case events.ResponseReceived() | events.TrailersReceived():
                reply.headers |= {
                    bytes(k).decode(errors="replace"): bytes(v).decode(errors="replace") for k, v in event.headers
                }
            case events.DataReceived():
                reply.body += event.data
                if len(reply.body) > self._most_bytes + _HEAD.size:
                    raise SourceError(f"answered with more than {self._most_bytes} bytes")
                self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case events.StreamEnded():
                reply.ended = True
            case events.StreamReset():
                raise SourceError(f"the server broke off with HTTP/2 error {event.error_code}")
            case events.ConnectionTerminated():
                self._going_away = True  # after what it still answers


def _left_seconds(deadline_ns: int) -> float:
    """TimeoutError: nothing is left."""
    left_ns = deadline_ns - monotonic_ns()
    if left_ns <= 0:
        raise TimeoutError
    return left_ns / NS_PER_SECOND
