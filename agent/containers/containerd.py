# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from containerd itself, for what runs there without Kubernetes: nerdctl, ctr, buildkit.

A container is in one of containerd's namespaces, and only its own must be asked; which that is, a cgroup does not tell.
The namespaces of Kubernetes and Docker are theirs to explain.
"""

from __future__ import annotations

from agent.containers.answers import Names, own_labels
from agent.containers.channel import Channel, UnansweredError
from agent.containers.messages import message
from agent.errors import SourceError
from agent.model import Container

_OTHERS = {"k8s.io", "moby"}
_MOST_NAMESPACES = 32
_NAME = "nerdctl/name"


class Containerd:
    """One containerd socket."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._channel = Channel(path)

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
            said = self._channel.call(method, message("Empty")(), "ListNamespacesResponse", deadline_ns)
        except UnansweredError:
            return []
        return [it.name for it in said.namespaces if it.name not in _OTHERS and it.name.isascii()][:_MOST_NAMESPACES]

    def _in(self, namespace: str, wanted: str, deadline_ns: int) -> Names | None:
        method = "/containerd.services.containers.v1.Containers/Get"
        request = message("GetContainerRequest")(id=wanted)
        header = (("containerd-namespace", namespace),)
        try:
            said = self._channel.call(method, request, "GetContainerResponse", deadline_ns, header).container
        except UnansweredError:
            return None
        if said.id != wanted:
            raise SourceError(f"{self.path}: asked for {wanted}, told about another")
        return Names(name=said.labels.get(_NAME, ""), image=said.image, labels=own_labels(said.labels))
