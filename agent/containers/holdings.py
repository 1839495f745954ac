# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who holds which GPU, asked of the kubelet every 30 s. An answer counts for two minutes, then nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from agent.clock import NS_PER_SECOND
from agent.containers.asking import Asked, Outcome
from agent.containers.sources import Socket
from agent.model import Container, ContainerKey, ContainerUsage, DeviceUuid, Usage

INTERVAL_NS = 30 * NS_PER_SECOND
_VALID_NS = 120 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Holder:
    """A container that a device was given to, whether or not it runs anything there."""

    namespace: str
    pod: str
    name: str  # the container's, in the pod
    resource: str  # "nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb"
    replicas: int = 1  # of a device that is shared by time slicing, how many times it was given


Held = Mapping[DeviceUuid, tuple[Holder, ...]]


class Kubelet(Protocol):
    """Where it is asked."""

    def list(self, deadline_ns: int) -> Held:
        """SourceError, SourceTimeoutError."""

    def close(self) -> None:
        """Ends a call that is under way; from any thread."""


def _open(path: str) -> Kubelet:
    from agent.containers.podresources import PodResources

    return PodResources(path)


class Holdings:
    """`poll` belongs to one thread, `held` to anybody."""

    def __init__(self, sockets: Iterable[Socket], limit_ns: int, clock: Callable[[], int]) -> None:
        self.asked = tuple(Asked(socket, _open, limit_ns, clock) for socket in sockets)
        self._clock = clock
        self.due_ns = 0
        self._latest: tuple[int, Held] | None = None

    def poll(self) -> None:
        """Asks when it is time to."""
        now_ns = self._clock()
        if now_ns < self.due_ns:
            return
        self.due_ns = now_ns + INTERVAL_NS
        for asked in self.asked:
            outcome, held = asked.ask(lambda kubelet, deadline_ns: kubelet.list(deadline_ns))
            if held is not None:
                self._latest = (now_ns, held)
            if outcome is not Outcome.ABSENT:
                return

    def held(self) -> Held | None:
        """By device; None when nobody has said so lately."""
        latest = self._latest
        return latest[1] if latest and self._clock() - latest[0] <= _VALID_NS else None


def holders(held: Held) -> tuple[ContainerUsage, ...]:
    """The same by container, with devices of which nothing but that is known."""
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
