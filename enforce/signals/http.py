# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`http`: last byte of a request read by the container → last byte of its answer written. HTTP/1.x on one port.

All processes of the container count, whether they use a GPU or not. What a request waited for before the server read
it, and what the network took, is not in it.

Invariant: an SLO that comes from a pod's annotations takes no place from a container that the policy file is about.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from agent.containers.index import Residents
from agent.core.clock import NS_PER_SECOND
from agent.core.model import Container, ContainerKey, Snapshot
from agent.node.procfs import Procfs
from enforce.model import Reading
from enforce.policy.model import HttpSource, Slo
from enforce.signals.http_probe import LOSSES, WATCHES, HttpProbes, HttpProcessProbes, WatchedPort
from enforce.signals.latency_window import Buckets, Requests, Windows
from enforce.signals.process_follower import FollowerSettings, ProcessFollower

_IDLE_NS = 5 * NS_PER_SECOND
_LOAD_RETRY_NS = 30 * NS_PER_SECOND
_FULL = f"more than {WATCHES} containers have the signal http, or more than {WATCHES // 2} by annotations"


class RequestCounter(Protocol):
    """Counts the requests of containers: a ProcessFollower."""

    def watch(self, container: Container, source: WatchedPort, now_ns: int) -> int | None:
        """To be called at every reading. The number for `buckets`; None while nothing is counted yet."""
        ...

    def forget(self, container: ContainerKey) -> None:
        """Watches the container no more."""
        ...

    def buckets(self, number: int) -> Buckets | None:
        """The cumulative histogram since this number began."""
        ...

    def details(self, number: int) -> Mapping[str, int]:
        """What was seen of it beside latencies, as `http_probe.details_of`; empty when it has ended."""
        ...

    def point(self, container: ContainerKey, slots: int) -> None:
        """The gates of these slots, as the bits of a number, count its requests."""
        ...

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there may be no latencies of it."""
        ...

    def tallies(self) -> Mapping[str, int]:
        """What was seen and missed, on the whole node."""
        ...


class Http:
    """Quantiles over the SLO's window from the kernel's cumulative histogram of the container."""

    name = "http"

    def __init__(self, counter: RequestCounter, requests: Requests, policy_slos: Iterable[Slo]) -> None:
        """`policy_slos`: of the policy file itself, and these very objects; every other one is a pod's own."""
        self._counter, self._policy_slos = counter, tuple(policy_slos)
        self._requests, self._windows = requests, Windows(requests)
        self._detailed_ns: dict[ContainerKey, int] = {}
        self._snapshot: Snapshot | None = None
        self._containers: dict[ContainerKey, Container] = {}

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` requests, or none are counted yet."""
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._containers.update((row.container.key, row.container) for row in snapshot.containers)
        known = self._containers.get(container)
        if known is None or not isinstance(slo.source, HttpSource):
            return None
        annotated = all(slo is not one for one in self._policy_slos)  # a pod may write the same as the file
        port = WatchedPort(slo.source.port, slo.source.path or "", annotated, slo.source.statuses)
        number = self._counter.watch(known, port, now_ns)
        if number is not None and now_ns - self._detailed_ns.get(container, -NS_PER_SECOND) >= NS_PER_SECOND:
            self._detailed_ns[container] = now_ns
            self._requests.note(container, self._counter.details(number))
        histograms = {number: self._counter.buckets(number)} if number is not None else {}
        return self._windows.read(container, histograms, slo, now_ns)

    def announce(self, container: ContainerKey, slots: Iterable[int]) -> None:
        """The gates of the devices with these slots count its requests, from their arrival to their answers.

        So a request shuts them before its first launch; and where there is none, none need be waited for.
        """
        self._counter.point(container, sum(1 << slot for slot in set(slots)))

    def trouble(self, container: ContainerKey) -> str | None:
        """What keeps the probes from counting, what else connections speak, or that all answers are errors."""
        if (trouble := self._counter.trouble(container)) is not None:
            return trouble
        foreign = self._counter.tallies().get("foreign", 0)
        if foreign:
            return f"{foreign} connections spoke something else than HTTP/1 (TLS? HTTP/2?)"
        counted = self._requests.of(container)
        answers = {} if counted is None else {k: n for k, n in counted.details.items() if k.startswith("status:") and n}
        if answers and counted is not None and not counted.requests:
            found = ", ".join(f"{count} {name.removeprefix('status:')}" for name, count in answers.items())
            return f"no answer has a status that slo.status counts: {found}"
        return None

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        gone = list(containers)
        self._windows.forget(gone)
        for container in gone:
            self._containers.pop(container, None)
            self._detailed_ns.pop(container, None)
            self._counter.forget(container)


def request_follower(
    proc: Procfs, object_path: Callable[[], Path], shared: Mapping[str, int] = MappingProxyType({})
) -> ProcessFollower[WatchedPort]:
    """Costs nothing until the first container is watched; the probes go with the last, seconds after it was read.

    `shared`: as HttpProbes has it.
    """
    settings = FollowerSettings("http", _LOAD_RETRY_NS, _IDLE_NS, admitted, _FULL)
    return ProcessFollower(
        settings, lambda: HttpProcessProbes(HttpProbes(object_path(), shared)), Residents(proc), proc
    )


def losses(follower: ProcessFollower[WatchedPort]) -> dict[str, int]:
    """For Snapshot.lost; empty where nothing was ever watched."""
    if not follower.started:
        return {}
    tallies, failed = follower.tallies(), follower.failed_rounds + follower.failed
    return {f"http:{name}": tallies.get(name, 0) for name in LOSSES} | {"http:failed": failed}


def admitted(
    wanted: Mapping[ContainerKey, WatchedPort], watched: Collection[ContainerKey]
) -> dict[ContainerKey, WatchedPort]:
    """Those that get a place: the policy file's first, then annotated ones up to half of the places.

    Of each kind those that have one keep it.
    """
    keys = sorted(wanted, key=lambda key: key not in watched)
    own = [key for key in keys if not wanted[key].annotated][:WATCHES]
    others = [key for key in keys if wanted[key].annotated][: min(WATCHES // 2, WATCHES - len(own))]
    return {key: wanted[key] for key in (*own, *others)}
