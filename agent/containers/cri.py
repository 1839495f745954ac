# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names over gRPC: from the Kubernetes container runtime interface, and from containerd itself.

CRI (containerd, CRI-O, k3s and the like): the container's own labels are the kubelet's; the users' labels are the
pod's, which its sandbox carries, as well as the pod's annotations at the time when the sandbox was made.

containerd, for what runs there without Kubernetes (nerdctl, ctr, buildkit): a container is in one of its namespaces;
the cgroup does not show which, so all are queried but those of Kubernetes and Docker, whose own sockets have better
names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agent.containers.grpc_channel import GrpcChannel, UnansweredError, message
from agent.containers.identity import Names, first_process, own_labels
from agent.core.errors import SourceError
from agent.core.model import Container

_VERSIONS = ("runtime.v1", "runtime.v1alpha2")  # containerd before 1.6 and CRI-O before 1.23 have only the latter


class Cri:
    """One CRI socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._channel = GrpcChannel(path)
        self._versions: tuple[str, ...] = _VERSIONS

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """None: it has no such container. SourceError."""
        found = self._one("ListContainers", "ListContainersResponse.containers", container.id, deadline_ns)
        if found is None:
            return None
        pod = self._one("ListPodSandbox", "ListPodSandboxResponse.items", found.pod_sandbox_id, deadline_ns)
        if pod is None:
            raise SourceError(f"{self.path}: container {container.id} is in a pod that does not exist")
        image, tgid = self._status(container.id, deadline_ns)
        return Names(
            name=found.metadata.name,
            pod=pod.metadata.name,
            namespace=pod.metadata.namespace,
            image=image or found.image.image,
            labels={**pod.labels, **found.labels},
            annotations=dict(pod.annotations),
            tgid=tgid,
        )

    def close(self) -> None:
        """Ends a look-up that is under way."""
        self._channel.close()

    def _one(self, method: str, kind_and_field: str, wanted: str, deadline_ns: int) -> Any:
        """The item of that id, None where there is none. The server finds it by prefix; ours is the whole id."""
        request = message(f"{method}Request")()
        request.filter.id = wanted
        kind, _, items = kind_and_field.partition(".")
        answer = self._call(method, request, kind, deadline_ns)
        listed = getattr(answer, items) if answer is not None else ()
        if any(item.id != wanted for item in listed):
            raise SourceError(f"{self.path}: asked for {wanted}, the answer is about another")
        return listed[0] if listed else None

    def _status(self, wanted: str, deadline_ns: int) -> tuple[str, int | None]:
        """The image's name (a list has what the kubelet passed on, which is a digest), and the first process.

        The pid is not in the interface; containerd and CRI-O both have it in what `verbose` adds.
        """
        request = message("ContainerStatusRequest")(container_id=wanted, verbose=True)
        answer = self._call("ContainerStatus", request, "ContainerStatusResponse", deadline_ns)
        if answer is None:
            return "", None
        if answer.status.id != wanted:
            raise SourceError(f"{self.path}: asked for {wanted}, the answer is about another")
        return str(answer.status.image.image), _pid_in(answer.info.get("info", ""))

    def _call(self, method: str, request: Any, kind: str, deadline_ns: int) -> Any:
        """None: not found, or the server (a containerd without the plugin) does not speak CRI at all."""
        for version in self._versions:
            try:
                answer = self._channel.call(f"/{version}.RuntimeService/{method}", request, kind, deadline_ns)
            except UnansweredError as error:
                if error.code == "NOT_FOUND":
                    return None
            else:
                self._versions = (version, *(other for other in _VERSIONS if other != version))
                return answer
        return None


def _pid_in(info: str) -> int | None:
    try:
        return first_process(json.loads(info), "pid")
    except (ValueError, RecursionError):
        return None


_OTHERS = {"k8s.io", "moby"}
_MOST_NAMESPACES = 32
_NAME = "nerdctl/name"


class Containerd:
    """One containerd socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._channel = GrpcChannel(path)

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """None: it has no such container. SourceError."""
        for namespace in self._namespaces(deadline_ns):
            if names := self._in(namespace, container.id, deadline_ns):
                return names
        return None

    def close(self) -> None:
        """Ends a look-up that is under way."""
        self._channel.close()

    def _namespaces(self, deadline_ns: int) -> list[str]:
        method = "/containerd.services.namespaces.v1.Namespaces/List"
        try:
            found = self._channel.call(method, message("Empty")(), "ListNamespacesResponse", deadline_ns)
        except UnansweredError:
            return []
        return [space.name for space in found.namespaces if space.name not in _OTHERS and space.name.isascii()][
            :_MOST_NAMESPACES
        ]

    def _in(self, namespace: str, wanted: str, deadline_ns: int) -> Names | None:
        method = "/containerd.services.containers.v1.Containers/Get"
        request = message("GetContainerRequest")(id=wanted)
        header = (("containerd-namespace", namespace),)
        try:
            found = self._channel.call(method, request, "GetContainerResponse", deadline_ns, header).container
        except UnansweredError:
            return None
        if found.id != wanted:
            raise SourceError(f"{self.path}: asked for {wanted}, the answer is about another")
        tgid = self._first_process(wanted, deadline_ns, header)
        return Names(name=found.labels.get(_NAME, ""), image=found.image, labels=own_labels(found.labels), tgid=tgid)

    def _first_process(self, wanted: str, deadline_ns: int, header: Sequence[tuple[str, str]]) -> int | None:
        method = "/containerd.services.tasks.v1.Tasks/Get"
        request = message("GetTaskRequest")(container_id=wanted)
        try:
            task = self._channel.call(method, request, "GetTaskResponse", deadline_ns, header)
        except UnansweredError as error:
            return 0 if error.code == "NOT_FOUND" else None
        return int(task.process.pid)
