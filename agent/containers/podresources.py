# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which pod was given which GPU: the kubelet's pod-resources socket. So pods are seen that hold a GPU and run nothing.

Devices of the NVIDIA device plugin only; those of dynamic resource allocation have no UUID in what the kubelet says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from agent.containers.answers import LONGEST_NAME
from agent.containers.channel import Channel, UnansweredError
from agent.containers.holdings import Held, Holder
from agent.containers.messages import message
from agent.errors import SourceError
from agent.model import DeviceUuid
from agent.names import printable

_VERSIONS = ("v1", "v1alpha1")  # kubelet before 1.20 has only the latter
_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
_UUIDS = ("GPU-", "MIG-")
_REPLICA = "::"  # time slicing: UUID::0, UUID::1, …
_MOST_BYTES = 8 << 20  # 250 pods, each with the list of its CPUs and memory
_MOST_HOLDERS = 16_384


class PodResources:
    """One kubelet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._channel = Channel(path, _MOST_BYTES)

    def list(self, deadline_ns: int) -> Held:
        """Every device that was given to somebody. SourceError."""
        for version in _VERSIONS:
            method = f"/{version}.PodResourcesLister/List"
            try:
                said = self._channel.call(method, message("Empty")(), "ListPodResourcesResponse", deadline_ns)
            except UnansweredError:
                continue
            return held(said)
        raise SourceError(f"{self.path}: knows no version of the pod-resources API that we do")

    def close(self) -> None:
        """Ends a call that is under way."""
        self._channel.close()


def held(said: Any) -> Held:
    """A ListPodResourcesResponse by device."""
    replicas = Counter(_given(said))
    by_device: dict[DeviceUuid, list[Holder]] = {}
    for (device, namespace, pod, name, resource), count in sorted(replicas.items())[:_MOST_HOLDERS]:
        by_device.setdefault(device, []).append(Holder(namespace, pod, name, resource, count))
    return {device: tuple(holders) for device, holders in by_device.items()}


def _given(said: Any) -> Iterator[tuple[DeviceUuid, str, str, str, str]]:
    for pod in said.pod_resources:
        for container in pod.containers:
            for device in container.devices:
                for device_id in device.device_ids:
                    if device.resource_name.startswith(_RESOURCES) or device_id.startswith(_UUIDS):
                        uuid = printable(device_id.partition(_REPLICA)[0], LONGEST_NAME)
                        texts = (pod.namespace, pod.name, container.name, device.resource_name)
                        namespace, name, inside, resource = (printable(text, LONGEST_NAME) for text in texts)
                        yield DeviceUuid(uuid), namespace, name, inside, resource
