# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names from the Docker Engine API, which Podman's service speaks as well.

Whoever may start a container may give it any label, so the kubelet's labels mean a pod only where the cgroup says that
the container is in one (dockershim, cri-dockerd): a rule about a namespace cannot be claimed from outside of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent.containers.answers import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, Names, own_labels
from agent.containers.identity import POD_UID
from agent.containers.unixhttp import UnixHttp
from agent.errors import SourceError
from agent.model import Container


class Engine:
    """One socket of a Docker or Podman service."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._http = UnixHttp(path)

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """None: it has no such container. SourceError."""
        target = f"/containers/{container.id}/json"
        answer = self._http.get(target, deadline_ns)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise SourceError(f"{self.path}: {target}: status {answer.status}")
        said = self._inspected(answer.body)
        if said.get("Id") != container.id:
            raise SourceError(f"{self.path}: asked for {container.id}, told about another")
        return _names(said, in_pod=POD_UID in container.labels)

    def close(self) -> None:
        """Ends a look-up that is under way."""
        self._http.close()

    def _inspected(self, body: bytes) -> Mapping[str, Any]:
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self.path}: the answer is not JSON: {error}") from error
        if not isinstance(said, dict):
            raise SourceError(f"{self.path}: the answer is no container")
        return said


def _names(said: Mapping[str, Any], in_pod: bool) -> Names:
    config = said.get("Config")
    config = config if isinstance(config, dict) else {}
    labels = config.get("Labels")
    labels = {k: v for k, v in labels.items() if isinstance(v, str)} if isinstance(labels, dict) else {}
    name, image = said.get("Name"), config.get("Image")
    name = name.removeprefix("/") if isinstance(name, str) else ""
    return Names(
        name=(labels.get(CONTAINER_NAME) or name) if in_pod else name,
        pod=labels.get(POD_NAME) if in_pod else None,
        namespace=labels.get(POD_NAMESPACE) if in_pod else None,
        image=image if isinstance(image, str) else None,
        labels=labels if in_pod else own_labels(labels),
    )
