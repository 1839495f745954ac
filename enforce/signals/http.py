# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`http`: first byte of a request read by the container → last byte of its answer written. HTTP/1.x on one port.

All processes of the container count, whether they use a GPU or not. What a request waited for before the server read
it, and what the network took, is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from agent.http.watching import Wish
from agent.model import Container, ContainerKey, Snapshot
from enforce.model import Reading
from enforce.policy.model import HttpSource, Slo
from enforce.signals.requests import Requests
from enforce.signals.window import Windows


class Watching(Protocol):
    """Who counts the requests: agent.http.watching.HttpWatching."""

    def want(self, wish: Wish, now_ns: int) -> None:
        """To be said again at every reading."""
        ...

    def forget(self, container: ContainerKey) -> None:
        """Nobody wants it any more."""
        ...

    def buckets(self, container: ContainerKey) -> tuple[int, bytes] | None:
        """Its cumulative histogram, and the number under which it began at none."""
        ...

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there may be no latencies of it."""
        ...


class Http:
    """Quantiles over the SLO's window from the kernel's cumulative histogram of the container."""

    name = "http"

    def __init__(self, watching: Watching, requests: Requests, promised: Iterable[Slo]) -> None:
        """`promised`: by the policy file itself, and these very objects; every other one is a pod's own."""
        self._watching, self._promised = watching, tuple(promised)
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._containers: dict[ContainerKey, Container] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests, or nobody counts them yet."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._containers.update((row.container.key, row.container) for row in snapshot.containers)
        known = self._containers.get(container)
        if known is None or not isinstance(slo.source, HttpSource):
            return None
        annotated = all(slo is not one for one in self._promised)  # a pod may say the same as the file
        wish = Wish(known, slo.source.port, slo.source.path or "", annotated=annotated)
        self._watching.want(wish, now_ns)
        counted = self._watching.buckets(container)
        return self._windows.read(container, dict([counted] if counted else ()), slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """What keeps the probes from counting, or what else the container's connections speak."""
        return self._watching.trouble(container)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        gone = list(containers)
        self._windows.forget(gone)
        for container in gone:
            self._containers.pop(container, None)
            self._watching.forget(container)
