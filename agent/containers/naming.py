# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Names of containers from the runtimes' sockets, looked up by a thread of its own and cached.

Invariant: `Naming.named` never waits and never fails. Until its names are known a container is returned as its cgroup
identifies it, and with its names from then on; key, id, runtime and cgroup stay. The one thread makes all requests one
after the other, each within a second, so no socket has two requests at a time, and a runtime that hangs costs a second
per back-off.

The cache is bounded; the least recently used entry is dropped first. A container that no runtime knows is looked up
again after 10 s, then twice as long each time, to 5 min; after every 10 s if a runtime that might know it did not
answer.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agent.containers.identity import Names, applied, bounded
from agent.containers.kubelet import DeviceHolders, HolderPolling
from agent.containers.runtimes import BUILTIN, KINDS, KUBELET, LIMIT_NS, LookupOutcome, Socket, SocketClient, Source
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.model import Container, ContainerKey
from agent.core.worker import Worker

MOST = 4096
FIRST_WAIT_NS, LONGEST_WAIT_NS = 10 * NS_PER_SECOND, 300 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class _Unknown:
    due_ns: int
    wait_ns: int


class NameCache:
    """Containers whose names are known, and those that no runtime knew. Not thread-safe; time is an argument."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._named: OrderedDict[ContainerKey, tuple[Names, Container]] = OrderedDict()
        self._unknown: OrderedDict[ContainerKey, _Unknown] = OrderedDict()

    def named(self, container: Container) -> Container | None:
        """The container with its names, None if unknown; the same object as long as its cgroup stays the same."""
        known = self._named.get(container.key)
        if known is None:
            return None
        self._named.move_to_end(container.key)
        names, named = known
        if named.cgroup != container.cgroup:
            named = applied(names, container)
            self._named[container.key] = (names, named)
        return named

    def due(self, container: Container, now_ns: int) -> bool:
        """Whether the container may be looked up now."""
        unknown = self._unknown.get(container.key)
        return unknown is None or now_ns >= unknown.due_ns

    def learn(self, container: Container, names: Names) -> None:
        """Stores the names that were found."""
        self._unknown.pop(container.key, None)
        self._named[container.key] = (names, applied(names, container))
        if len(self._named) > self._most:
            self._named.popitem(last=False)

    def miss(self, container: Container, now_ns: int, all_answered: bool) -> None:
        """Stores that no names were found. `all_answered`: no runtime that might know it failed to answer."""
        before = self._unknown.pop(container.key, None)
        grown_ns = min(2 * before.wait_ns, LONGEST_WAIT_NS) if before and all_answered else FIRST_WAIT_NS
        self._unknown[container.key] = _Unknown(now_ns + grown_ns, grown_ns)
        if len(self._unknown) > self._most:
            self._unknown.popitem(last=False)

    def __len__(self) -> int:
        return len(self._named) + len(self._unknown)


_log = logging.getLogger(__name__)
_RUNTIME_ID = re.compile(r"[0-9a-f]{64}")  # the ids of runtimes that have a socket
_GRACE_SECONDS = 1.0


class Naming:
    """A context manager: inside it the thread runs. The other methods are for any thread.

    `clock`: for the waits between look-ups; the time limit of each is by the real clock.
    """

    def __init__(
        self,
        sockets: Iterable[Socket] = BUILTIN,
        limit_ns: int = LIMIT_NS,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        sockets = tuple(sockets)
        self._clock = clock
        self._runtimes = tuple(
            SocketClient(socket, KINDS[socket.kind].open, limit_ns, clock) for socket in sockets if socket.kind in KINDS
        )
        kubelets = [socket for socket in sockets if socket.kind == KUBELET]
        self._holder_polling = HolderPolling(kubelets, limit_ns, clock)
        self._clients: tuple[SocketClient[Any], ...] = (*self._runtimes, *self._holder_polling.clients)
        self._cache = NameCache()
        self._waiting: OrderedDict[ContainerKey, Container] = OrderedDict()
        self._refused = 0
        self._lock = threading.Lock()
        self._worker = Worker("naming", self._step, failed="a look-up")

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes a second at most, whatever the other sides do."""
        self._worker.stop()
        for client in self._clients:
            client.close()
        if not self._worker.close(_GRACE_SECONDS):
            _log.warning("a request to a container runtime hangs, even after its socket was closed: thread abandoned")

    def named(self, container: Container) -> Container:
        """The container with its names if they are known by now; queues a look-up if not."""
        if not _RUNTIME_ID.fullmatch(container.id):
            return container
        with self._lock:
            known = self._cache.named(container)
            if known is not None:
                return known
            if container.key not in self._waiting and self._cache.due(container, self._clock()):
                self._queue(container)
        return container

    def holders(self) -> DeviceHolders | None:
        """The containers that each device was allocated to; None while no kubelet answers."""
        return self._holder_polling.latest()

    def counts(self) -> Mapping[tuple[str, str], int]:
        """(source, outcome) → number of look-ups since the start."""
        total: Counter[tuple[str, str]] = Counter()
        for client in self._clients:
            total.update({(client.socket.kind, str(outcome)): n for outcome, n in client.counts().items() if n})
        if self._refused:
            total["queue", "refused"] = self._refused
        return total

    def _queue(self, container: Container) -> None:
        if len(self._waiting) >= MOST:
            self._refused += 1
            return
        self._waiting[container.key] = container
        self._worker.wake()

    def _step(self) -> float:
        """Polls the kubelet when that is due and looks up one container. Returns the seconds until the next step."""
        self._holder_polling.poll()
        with self._lock:
            container = next(iter(self._waiting.values()), None)
        if container is not None:
            self._settle(container, *self._look_up(container))
        with self._lock:
            if self._waiting:
                return 0.0
        return max(0.0, (self._holder_polling.due_ns - self._clock()) / NS_PER_SECOND)

    def _settle(self, container: Container, names: Names | None, all_answered: bool) -> None:
        with self._lock:
            self._waiting.pop(container.key, None)
            if names is None:
                self._cache.miss(container, self._clock(), all_answered)
            else:
                self._cache.learn(container, names)

    def _look_up(self, container: Container) -> tuple[Names | None, bool]:
        """Its names, and whether every runtime that is present answered."""
        all_answered = True
        for client in self._likeliest_first(container):
            if self._worker.stopping:
                return None, False
            outcome, names = client.query(lambda source, deadline_ns: _bounded(source.look_up(container, deadline_ns)))
            if names is not None:
                return names, True
            all_answered = all_answered and outcome in (LookupOutcome.UNKNOWN, LookupOutcome.ABSENT)
        return None, all_answered

    def _likeliest_first(self, container: Container) -> list[SocketClient[Source]]:
        return sorted(self._runtimes, key=lambda client: container.runtime not in KINDS[client.socket.kind].runtimes)


def _bounded(names: Names | None) -> Names | None:
    return bounded(names) if names else None
