# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from the Kubernetes container runtime interface: containerd, CRI-O, k3s and the like.

The container's own labels are only the kubelet's; those that people give are the pod's, which its sandbox carries,
as it does the pod's annotations as they were when it was made.
"""

from __future__ import annotations

from typing import Any

from agent.containers.answers import Names
from agent.containers.channel import Channel, UnansweredError
from agent.containers.messages import message
from agent.errors import SourceError
from agent.model import Container

_VERSIONS = ("runtime.v1", "runtime.v1alpha2")  # containerd before 1.6 and CRI-O before 1.23 have only the latter


class Cri:
    """One CRI socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._channel = Channel(path)
        self._versions: tuple[str, ...] = _VERSIONS

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """None: it has no such container. SourceError."""
        found = self._one("ListContainers", "ListContainersResponse.containers", container.id, deadline_ns)
        if found is None:
            return None
        pod = self._one("ListPodSandbox", "ListPodSandboxResponse.items", found.pod_sandbox_id, deadline_ns)
        if pod is None:
            raise SourceError(f"{self.path}: container {container.id} is in a pod that does not exist")
        return Names(
            name=found.metadata.name,
            pod=pod.metadata.name,
            namespace=pod.metadata.namespace,
            image=self._image(container.id, deadline_ns) or found.image.image,
            labels={**pod.labels, **found.labels},
            annotations=dict(pod.annotations),
        )

    def close(self) -> None:
        """Ends a look-up that is under way."""
        self._channel.close()

    def _one(self, method: str, answer: str, wanted: str, deadline_ns: int) -> Any:
        """The item of that id, None where there is none. The server finds it by prefix; ours is the whole id."""
        request = message(f"{method}Request")()
        request.filter.id = wanted
        kind, _, items = answer.partition(".")
        said = self._call(method, request, kind, deadline_ns)
        listed = getattr(said, items) if said is not None else ()
        if any(item.id != wanted for item in listed):
            raise SourceError(f"{self.path}: asked for {wanted}, told about another")
        return listed[0] if listed else None

    def _image(self, wanted: str, deadline_ns: int) -> str:
        """As people write it; a list has what the kubelet passed on, which is a digest."""
        request = message("ContainerStatusRequest")(container_id=wanted)
        said = self._call("ContainerStatus", request, "ContainerStatusResponse", deadline_ns)
        if said is not None and said.status.id != wanted:
            raise SourceError(f"{self.path}: asked for {wanted}, told about another")
        return str(said.status.image.image) if said is not None else ""

    def _call(self, method: str, request: Any, answer: str, deadline_ns: int) -> Any:
        """None: it has no such thing, or (a containerd without the plugin) does not speak CRI at all."""
        for version in self._versions:
            try:
                said = self._channel.call(f"/{version}.RuntimeService/{method}", request, answer, deadline_ns)
            except UnansweredError as error:
                if error.code == "NOT_FOUND":
                    return None
            else:
                self._versions = (version, *(other for other in _VERSIONS if other != version))
                return said
        return None
