# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The thread that keeps the HTTP probes there while somebody asks for a container, and tells them its processes.

Invariant: whoever may only annotate pods takes no place from a container that the policy file is about.

Whoever decides ten times a second only reads; loading takes the better part of a second, and looking for processes
takes reads of /proc. A process that is forked between two looks is added by the kernel itself. What is not asked for
any more is dropped after some seconds; with the last container the probes go.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.containers.residents import Residents
from agent.errors import WardenError
from agent.http.layout import LOSSES, WATCHES
from agent.http.probes import HttpProbes
from agent.model import Container, ContainerKey
from agent.procfs import Procfs

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 1.0
_PATIENCE_NS = 5 * NS_PER_SECOND  # so long nobody asked: nobody wants to know
_RETRY_NS = 30 * NS_PER_SECOND
_FULL = f"more than {WATCHES} containers have the signal http, or more than {WATCHES // 2} by annotations"


@dataclass(frozen=True, slots=True)
class Wish:
    """Requests to this port of this container whose target begins so."""

    container: Container
    port: int
    path: str = ""
    annotated: bool = False  # its pod's own, not the policy file's


@dataclass(frozen=True, slots=True)
class _Watched:
    wish: Wish
    place: int
    epoch: int
    processes: int = 0  # by the last look


class HttpWatching:
    """Costs nothing until the first `want`."""

    def __init__(self, proc: Procfs, object_path: Callable[[], Path]) -> None:
        self._residents, self._object_path = Residents(proc), object_path
        self._lock = threading.Lock()  # over all below; never held while something is loaded or looked for
        self._wishes: dict[ContainerKey, tuple[Wish, int]] = {}
        self._watched: dict[ContainerKey, _Watched] = {}
        self._refused: frozenset[ContainerKey] = frozenset()  # by the last look
        self._probes: HttpProbes | None = None
        self._tallies: Counter[str] = Counter()  # of probes that are gone
        self._epochs = 0
        self._retry_ns = 0
        self._problem: str | None = None
        self.failures = 0
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def want(self, wish: Wish, now_ns: int) -> None:
        """To be said again at every reading."""
        with self._lock:
            is_new = wish.container.key not in self._wishes
            self._wishes[wish.container.key] = (wish, now_ns)
        if is_new:
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="http", daemon=True)
            self._thread.start()

    def forget(self, container: ContainerKey) -> None:
        """Nobody wants it any more."""
        with self._lock:
            self._wishes.pop(container, None)

    def buckets(self, container: ContainerKey) -> tuple[int, bytes] | None:
        """Its cumulative histogram, and the number under which it began at none. None: it is not watched yet."""
        with self._lock:
            watched = self._watched.get(container)
            if watched is None or self._probes is None:
                return None
            return watched.epoch, self._probes.buckets(watched.place)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there may be no latencies of it, in words; None where nothing is known to be wrong."""
        with self._lock:
            watched, is_refused = self._watched.get(container), container in self._refused
        if is_refused:
            return _FULL
        if watched is None:
            return self._problem or "its requests are counted from now on"
        if not watched.processes:
            return f"no process of {container} was found"
        foreign = self.tallies().get("foreign", 0)
        return f"{foreign} connections spoke something else than HTTP/1 (TLS? HTTP/2?)" if foreign else None

    def tallies(self) -> dict[str, int]:
        """What was seen and missed since the first probes."""
        with self._lock:
            return dict(self._tallies + Counter(self._probes.tallies() if self._probes else {}))

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost; empty where nothing was ever watched."""
        if self._thread is None:
            return {}
        tallies = self.tallies()
        return {f"http:{name}": tallies.get(name, 0) for name in LOSSES} | {"http:failed": self.failures}

    def close(self) -> None:
        """Ends the thread and takes the probes away."""
        self._ending.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._unload()

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.clear()
            try:
                self._look(monotonic_ns())
            except Exception:  # noqa: BLE001  # a look that fails is repeated; meanwhile the kernel follows forks
                self.failures += 1
                _log.exception("looking for the processes of watched containers")
            self._wake.wait(_ROUND_SECONDS)

    def _look(self, now_ns: int) -> None:
        wishes = self._current(now_ns)
        if not wishes:
            self._unload()
            return
        probes = self._probes or self._load(now_ns)
        if probes is None:
            return
        self._assign(probes, wishes)
        for watched in list(self._watched.values()):
            self._follow(probes, watched)

    def _current(self, now_ns: int) -> dict[ContainerKey, Wish]:
        with self._lock:
            for key in [key for key, (_, asked_ns) in self._wishes.items() if now_ns - asked_ns > _PATIENCE_NS]:
                del self._wishes[key]
            return {key: wish for key, (wish, _) in self._wishes.items()}

    def _load(self, now_ns: int) -> HttpProbes | None:
        if now_ns < self._retry_ns:
            return None
        try:
            probes = HttpProbes(self._object_path())
        except WardenError as error:
            self.failures += 1
            self._retry_ns = now_ns + _RETRY_NS
            self._problem = str(error)
            _log.error("the signal http has no data: %s", error)
            return None
        with self._lock:
            self._probes, self._problem = probes, None
        return probes

    def _unload(self) -> None:
        with self._lock:
            probes, self._probes = self._probes, None
            if probes is not None:
                self._tallies += Counter(probes.tallies())
            for key in self._watched:
                self._residents.forget(key)
            self._watched, self._refused = {}, frozenset()
        if probes is not None:
            probes.close()

    def _assign(self, probes: HttpProbes, wishes: dict[ContainerKey, Wish]) -> None:
        """A place for each wish, as long as there are any. One that changed begins anew."""
        placed = admitted(wishes, self._watched)
        for key, watched in list(self._watched.items()):
            if key not in placed or _differ(placed[key], watched.wish):
                with self._lock:
                    del self._watched[key]
                self._residents.forget(key)
                probes.unwatch(watched.place)
        free = sorted(set(range(WATCHES)) - {watched.place for watched in self._watched.values()}, reverse=True)
        for key, wish in placed.items():
            if key in self._watched:
                continue
            self._epochs += 1
            watched = _Watched(wish, free.pop(), self._epochs)
            probes.watch(watched.place, watched.epoch, wish.port, wish.path)
            with self._lock:
                self._watched[key] = watched
        self._refuse(frozenset(wishes.keys() - placed.keys()))

    def _refuse(self, refused: frozenset[ContainerKey]) -> None:
        """Each container counts once; the log hears of it when there begin to be any."""
        new = sorted(refused - self._refused)
        self.failures += len(new)
        if new and not self._refused:
            _log.error("%s: %s is not watched", _FULL, new[0])
        with self._lock:
            self._refused = refused

    def _follow(self, probes: HttpProbes, watched: _Watched) -> None:
        """Asked first who is followed: whoever is forked after that is not taken for one that left."""
        followed = [tgid for tgid, place in probes.followed().items() if place == watched.place]
        residents = self._residents.of(watched.wish.container)
        self.failures += probes.follow(watched.place, watched.epoch, residents, followed)
        if len(residents) != watched.processes:
            with self._lock:
                self._watched[watched.wish.container.key] = replace(watched, processes=len(residents))


def admitted(wishes: Mapping[ContainerKey, Wish], watched: Collection[ContainerKey]) -> dict[ContainerKey, Wish]:
    """Those that get a place: the policy file's first, then annotated ones up to half of the places.

    Of each kind those that have one keep it.
    """
    keys = sorted(wishes, key=lambda key: key not in watched)
    own = [key for key in keys if not wishes[key].annotated][:WATCHES]
    others = [key for key in keys if wishes[key].annotated][: min(WATCHES // 2, WATCHES - len(own))]
    return {key: wishes[key] for key in (*own, *others)}


def _differ(one: Wish, other: Wish) -> bool:
    return (one.port, one.path, one.container.cgroup) != (other.port, other.path, other.container.cgroup)
