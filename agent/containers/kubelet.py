# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The pods that each GPU is allocated to, from the kubelet's pod-resources socket, also those that run nothing on it.

Polled every 30 s; an answer is valid for two minutes. Devices of the NVIDIA device plugin only: those of dynamic
resource allocation have no UUID in the kubelet's answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from agent.containers.identity import LONGEST_NAME
from agent.containers.runtimes import LookupOutcome, Socket, SocketClient
from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SourceError
from agent.core.model import Container, ContainerKey, ContainerUsage, DeviceUuid, Usage
from agent.core.text import printable

INTERVAL_NS = 30 * NS_PER_SECOND
_VALID_NS = 120 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Holder:
    """A container that a device is allocated to, whether or not it runs anything there."""

    namespace: str
    pod: str
    name: str  # the container's, in the pod
    resource: str  # "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
    replicas: int = 1  # of a device that is shared by time slicing: how many of its replicas were allocated


DeviceHolders = Mapping[DeviceUuid, tuple[Holder, ...]]


class Kubelet(Protocol):
    """A connection to the pod-resources API."""

    def list(self, deadline_ns: int) -> DeviceHolders:
        """SourceError, SourceTimeoutError."""

    def close(self) -> None:
        """Ends a call that is under way; from any thread."""


def _open(path: str) -> Kubelet:
    return PodResources(path)


class HolderPolling:
    """Polls the kubelet. `poll` belongs to one thread, `latest` is for any."""

    def __init__(self, sockets: Iterable[Socket], limit_ns: int, clock: Callable[[], int]) -> None:
        self.clients = tuple(SocketClient(socket, _open, limit_ns, clock) for socket in sockets)
        self._clock = clock
        self.due_ns = 0
        self._latest: tuple[int, DeviceHolders] | None = None

    def poll(self) -> None:
        """Queries the kubelet when that is due."""
        now_ns = self._clock()
        if now_ns < self.due_ns:
            return
        self.due_ns = now_ns + INTERVAL_NS
        for client in self.clients:
            outcome, held = client.query(lambda kubelet, deadline_ns: kubelet.list(deadline_ns))
            if held is not None:
                self._latest = (now_ns, held)
            if outcome is not LookupOutcome.ABSENT:
                return

    def latest(self) -> DeviceHolders | None:
        """By device; None without a valid answer."""
        latest = self._latest
        return latest[1] if latest and self._clock() - latest[0] <= _VALID_NS else None


def holders(held: DeviceHolders) -> tuple[ContainerUsage, ...]:
    """The same by container, as usages without figures."""
    devices: dict[Holder, list[DeviceUuid]] = {}
    for device, containers in held.items():
        for holder in containers:
            devices.setdefault(holder, []).append(device)
    return tuple(
        ContainerUsage(_container(holder), tuple(Usage(it, None, None, None, None, None, None) for it in uuids), ())
        for holder, uuids in devices.items()
    )


def _container(holder: Holder) -> Container:
    key = ContainerKey(f"pod:{holder.namespace}/{holder.pod}/{holder.name}")
    return Container(key, holder.name, "kubelet", pod=holder.pod, namespace=holder.namespace)


_VERSIONS = ("v1", "v1alpha1")  # kubelet before 1.20 has only the latter
_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
_UUIDS = ("GPU-", "MIG-")
_REPLICA = "::"  # time slicing: UUID::0, UUID::1, …
_MOST_BYTES = 8 << 20  # 250 pods, each with the list of its CPUs and memory
_MOST_ALLOCATIONS = 16_384  # replicas included; an answer could have a million, and take seconds


class PodResources:
    """One kubelet."""

    def __init__(self, path: str) -> None:
        from agent.containers.grpc_channel import GrpcChannel  # 8 MiB, which only a node with a kubelet pays

        self.path = path
        self._channel = GrpcChannel(path, _MOST_BYTES)

    def list(self, deadline_ns: int) -> DeviceHolders:
        """The holders of every allocated device. SourceError."""
        from agent.containers.grpc_channel import UnansweredError, message

        for version in _VERSIONS:
            method = f"/{version}.PodResourcesLister/List"
            try:
                answer = self._channel.call(method, message("Empty")(), "ListPodResourcesResponse", deadline_ns)
            except UnansweredError:
                continue
            return by_device(answer)
        raise SourceError(f"{self.path}: no version of the pod-resources API in common")

    def close(self) -> None:
        """Ends a call that is under way."""
        self._channel.close()


def by_device(answer: Any) -> DeviceHolders:
    """A ListPodResourcesResponse by device."""
    replicas = Counter(islice(_allocations(answer), _MOST_ALLOCATIONS))
    holders: dict[DeviceUuid, list[Holder]] = {}
    for (device, namespace, pod, name, resource), count in sorted(replicas.items()):
        holders.setdefault(device, []).append(Holder(namespace, pod, name, resource, count))
    return {device: tuple(containers) for device, containers in holders.items()}


def _allocations(answer: Any) -> Iterator[tuple[DeviceUuid, str, str, str, str]]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for device in container.devices:
                for device_id in device.device_ids:
                    if device.resource_name.startswith(_RESOURCES) or device_id.startswith(_UUIDS):
                        uuid = printable(device_id.partition(_REPLICA)[0], LONGEST_NAME)
                        texts = (pod.namespace, pod.name, container.name, device.resource_name)
                        namespace, name, inside, resource = (printable(text, LONGEST_NAME) for text in texts)
                        yield DeviceUuid(uuid), namespace, name, inside, resource
