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

A name is a claim of the cgroup until the runtime confirms it: its own first process of that container has to lie in
this very cgroup. Where it lies in another one, that one is the container (`placed`), and this one gets no name.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agent.containers.identity import Names, applied, bounded, identify, is_hash, parse_cgroup
from agent.containers.index import cgroup_tree, path_of_init
from agent.containers.kubelet import DeviceHolders, HolderPolling
from agent.containers.runtimes import BUILTIN, KINDS, KUBELET, LIMIT_NS, LookupOutcome, NameSource, Socket, SocketClient
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, SetupError
from agent.core.model import Container, ContainerKey
from agent.core.text import printable
from agent.core.worker import Worker
from agent.node.cgroups import CgroupTree
from agent.node.procfs import Procfs

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
        self._unknown: OrderedDict[str, _Unknown] = OrderedDict()  # by cgroup: two may claim one key

    def named(self, container: Container) -> Container | None:
        """The container with its names, None if unknown; the same object as long as its cgroup stays the same."""
        known = self._named.get(container.key)
        if known is None:
            return None
        self._named.move_to_end(container.key)
        _, named = known
        return named if named.cgroup == container.cgroup else None  # another cgroup has to be confirmed, too

    def due(self, container: Container, now_ns: int) -> bool:
        """Whether the container may be looked up now."""
        unknown = self._unknown.get(container.cgroup)
        return unknown is None or now_ns >= unknown.due_ns

    def learn(self, container: Container, names: Names) -> None:
        """Stores the names that were found."""
        self._unknown.pop(container.cgroup, None)
        self._named[container.key] = (names, applied(names, container))
        if len(self._named) > self._most:
            self._named.popitem(last=False)

    def miss(self, container: Container, now_ns: int, all_answered: bool) -> None:
        """Stores that no names were found. `all_answered`: no runtime that might know it failed to answer."""
        before = self._unknown.pop(container.cgroup, None)
        grown_ns = min(2 * before.wait_ns, LONGEST_WAIT_NS) if before and all_answered else FIRST_WAIT_NS
        self._unknown[container.cgroup] = _Unknown(now_ns + grown_ns, grown_ns)
        if len(self._unknown) > self._most:
            self._unknown.popitem(last=False)

    def __len__(self) -> int:
        return len(self._named) + len(self._unknown)


_log = logging.getLogger(__name__)
MOST_PLACED = 1024
_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Places:
    """Where processes lie, as /proc and the cgroups show it."""

    proc: Procfs
    tree: CgroupTree
    init_path: str

    @classmethod
    def of_node(cls) -> Places:
        """Of this machine, in the caller's cgroup namespace."""
        proc = Procfs()
        return cls(proc, cgroup_tree(proc), path_of_init(proc))

    def of_process(self, tgid: int | None) -> str | None:
        """The cgroup of the container that this process is in. None: it is gone, or there is none."""
        if not tgid:
            return None
        try:
            return identify(parse_cgroup(self.proc.cgroup(tgid)), self.init_path).cgroup
        except (GoneError, SetupError):
            return None


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
        self._elsewhere: Counter[str] = Counter()  # by kind of socket
        self._placed: OrderedDict[ContainerKey, str] = OrderedDict()
        self._places: Places | None = None  # made by the thread, which is in the node's cgroup namespace
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
        if not is_hash(container.id) or container.uid is not None:  # sockets are root's: they know no user's
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
        total.update({(kind, "elsewhere"): n for kind, n in self._elsewhere.items()})
        if self._refused:
            total["queue", "refused"] = self._refused
        return total

    def placed(self) -> Mapping[ContainerKey, str]:
        """The cgroups of containers whose id another cgroup claimed, as their runtimes reported it."""
        with self._lock:
            return dict(self._placed)

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
                return (names, True) if self._confirms(container, names, client.socket.kind) else (None, True)
            all_answered = all_answered and outcome in (LookupOutcome.UNKNOWN, LookupOutcome.ABSENT)
        return None, all_answered

    def _confirms(self, container: Container, names: Names, kind: str) -> bool:
        """Whether the runtime's own process lies in this cgroup. A runtime that tells no pid is believed."""
        if names.tgid is None:
            return True
        if self._places is None:
            self._places = Places.of_node()
        place = self._places.of_process(names.tgid)
        if place == container.cgroup:
            return True
        if place is None:  # none runs: so nothing may lie in its cgroup, of which the last figures get their name
            return not self._places.tree.exists(container.cgroup)
        with self._lock:
            self._elsewhere[kind] += 1
            self._placed[container.key] = place
            if len(self._placed) > MOST_PLACED:
                self._placed.popitem(last=False)
        shown = printable(container.cgroup, 256)
        _log.warning(
            "cgroup %s claims to be %s, which %s runs in %s", shown, container.key, kind, printable(place, 256)
        )
        return False

    def _likeliest_first(self, container: Container) -> list[SocketClient[NameSource]]:
        return sorted(self._runtimes, key=lambda client: container.runtime not in KINDS[client.socket.kind].runtimes)


def _bounded(names: Names | None) -> Names | None:
    return bounded(names) if names else None
