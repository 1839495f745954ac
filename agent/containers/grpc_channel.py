# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gRPC on a UNIX socket: one call at a time, each with a time limit and a longest answer.

The connection is kept while it works and dropped when a call fails, so a runtime that was restarted is found again by
the next call rather than by gRPC's own, slower, back-off.

The messages are tables of the fields that are read. One table serves all versions whose numbers agree: CRI v1 and
v1alpha2, podresources v1 and v1alpha1. Numbers: api.proto of k8s.io/cri-api and k8s.io/kubelet, containerd's
api/services.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

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


os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes a line of its own when a runtime is restarted

MOST_BYTES = 1 << 20  # of an answer


class UnansweredError(SourceError):
    """The server answered with a status that is neither success nor failure for us: see `code`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # "NOT_FOUND" | "UNIMPLEMENTED"


class Channel:
    """One socket. `close` may come from any thread and ends a call that is under way."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._lock = threading.Lock()
        self._open: Any = None
        self._closed = False

    def call(
        self, method: str, request: Any, answer: str, deadline_ns: int, metadata: Sequence[tuple[str, str]] = ()
    ) -> Any:
        """The answer to `method` ("/package.Service/Method"), a message of that name. UnansweredError, SourceError."""
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise SourceTimeoutError(f"{self._path}: no time left for {method}")
        try:
            send = self._channel().unary_unary(method)
            received = send(request.SerializeToString(), timeout=left_ns / NS_PER_SECOND, metadata=tuple(metadata))
        except grpc.RpcError as error:
            raise self._translated(method, error) from error
        except ValueError as error:  # what grpc raises for a channel that was closed meanwhile
            raise SourceError(f"{self._path}: closed") from error
        return self._parsed(method, received, answer)

    def close(self) -> None:
        """Ends a call that is under way; no further one can be made."""
        with self._lock:
            self._closed = True
        self._drop()

    def _channel(self) -> Any:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self._path}: closed")
            if self._open is None:
                options = [
                    ("grpc.default_authority", "localhost"),  # Go's servers refuse the path that grpc would send
                    ("grpc.enable_http_proxy", 0),
                    ("grpc.max_receive_message_length", self._most_bytes),
                    ("grpc.use_local_subchannel_pool", 1),
                ]
                self._open = grpc.insecure_channel(f"unix:{self._path}", options=options)
            return self._open

    def _drop(self) -> None:
        with self._lock:
            channel, self._open = self._open, None
        if channel is not None:
            channel.close()

    def _translated(self, method: str, error: Any) -> SourceError:
        code = error.code().name
        if code in ("NOT_FOUND", "UNIMPLEMENTED"):
            return UnansweredError(f"{self._path}: {method}: {code}", code)
        self._drop()
        what = f"{self._path}: {method}: {code}: {error.details()}"
        return SourceTimeoutError(what) if code == "DEADLINE_EXCEEDED" else SourceError(what)

    def _parsed(self, method: str, received: bytes, answer: str) -> Any:
        try:
            return message(answer).FromString(received)
        except DecodeError as error:
            self._drop()
            raise SourceError(f"{self._path}: {method} was answered with something else: {error}") from error
