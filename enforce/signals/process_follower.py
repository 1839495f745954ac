# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Keeps a signal's probes on the processes of the containers that are watched, from a thread of its own.

The decision loop calls `watch` and `buckets` ten times a second, and neither waits: loading BPF programs takes the
better part of a second, looking for processes reads /proc, and attaching reads programs.

Invariants: nothing is loaded before the first container is watched; a process that cannot be followed is logged once,
counted and retried, and takes nothing from the others; which processes are followed is read from the kernel in every
round, since it adds forked children and deletes ended processes itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, ProbeError, SetupError, WardenError
from agent.core.model import Container, ContainerKey, ProcessId
from agent.core.worker import Worker
from agent.node.procfs import Procfs
from enforce.signals.latency_window import Buckets
from enforce.signals.process_probes import KernelSide, ProcessProbes, S

_log = logging.getLogger(__name__)
_ROUND_SECONDS = 1.0
_RETRY_NS = 5 * NS_PER_SECOND
_MOST_COUNTED = 1024
PENDING = "its processes have not been looked for yet"
_REASONS: dict[type[BaseException], str] = {GoneError: "no_binary", ProbeError: "refused", SetupError: "not_allowed"}


class ContainerProcesses(Protocol):
    """Lists the processes of a container: agent.containers.index.Residents."""

    def of(self, container: Container) -> set[int]:
        """Their tgids."""
        ...

    def forget(self, container: ContainerKey) -> None:
        """Drops what is kept about a container."""
        ...


@dataclass(frozen=True, slots=True)
class FollowerSettings(Generic[S]):
    """`admit` chooses, from all that is wanted by container and those that are watched already; others report `full`.

    `idle_ns`: a container that was not read for so long is watched no more, and with the last one the object is
    unloaded. None: both stay until `forget` and `close`.
    """

    signal: str
    load_retry_ns: int = _RETRY_NS
    idle_ns: int | None = None
    admit: Callable[[Mapping[ContainerKey, S], Collection[ContainerKey]], Collection[ContainerKey]] | None = None
    full: str = ""


@dataclass(slots=True)
class _Watch(Generic[S]):
    """One container, and what is watched in it. The reader writes the first five fields, the follower the others."""

    container: Container
    source: S
    asked_ns: int
    only: frozenset[ProcessId] | None = None  # in place of the container's own processes
    pointed: tuple[int, int] | None = None  # the number, and the gates that count its requests
    number: int | None = None  # while it counts
    refused: bool = False  # not admitted
    trouble: str | None = PENDING
    logged: str | None = None  # the last trouble that the log has
    retry_ns: dict[ProcessId, int] = field(default_factory=dict)  # of processes that could not be followed


class ProcessFollower(Generic[S]):
    """See the module. `load` makes the kernel side, `processes` lists containers' own; both run on the thread alone."""

    def __init__(
        self,
        settings: FollowerSettings[S],
        load: Callable[[], ProcessProbes[S]],
        processes: ContainerProcesses,
        proc: Procfs,
    ) -> None:
        self._settings, self._processes, self._proc = settings, processes, proc
        self._kernel = KernelSide(settings.signal, load, settings.load_retry_ns)
        self._lock = threading.Lock()  # over the next three
        self._watches: dict[ContainerKey, _Watch[S]] = {}
        self._ended: list[_Watch[S]] = []  # for the thread to take away
        self._started = False
        self._numbers = itertools.count(1)
        self.failures: Counter[tuple[S, str]] = Counter()  # by what was watched, and reason; bounded
        self.failed = 0  # the sum, of all sources
        self._worker = Worker(
            settings.signal, self.step, failed="following processes", readable=self._kernel.changes_fds
        )

    @property
    def started(self) -> bool:
        """Whether any container was ever watched."""
        return self._started

    @property
    def failed_rounds(self) -> int:
        """Rounds that raised."""
        return self._worker.failures

    def watch(
        self, container: Container, source: S, now_ns: int, only: Collection[ProcessId] | None = None
    ) -> int | None:
        """To be called at every reading. The number for `buckets`; None while nothing is counted yet.

        `only`: these processes in place of the container's own.
        """
        with self._lock:
            watch = self._watches.get(container.key)
            if watch is not None and (watch.source, watch.container.cgroup) != (source, container.cgroup):
                self._ended.append(self._watches.pop(container.key))
                watch = None
            is_new = watch is None
            if watch is None:
                watch = self._watches[container.key] = _Watch(container, source, now_ns)
            watch.source, watch.asked_ns = source, now_ns
            watch.only = None if only is None else frozenset(only)
            if not self._started:
                self._worker.start()
                self._started = True  # not if no thread can be made now
        if is_new:
            self.wake()
        return watch.number

    def forget(self, container: ContainerKey) -> None:
        """Watches the container no more."""
        with self._lock:
            watch = self._watches.pop(container, None)
            if watch is not None:
                self._ended.append(watch)

    def buckets(self, number: int) -> Buckets | None:
        """The cumulative histogram of a watch, from zero when it began; None when it has ended."""
        return self._kernel.buckets(number)

    def point(self, container: ContainerKey, slots: int) -> None:
        """The gates of these slots, as the bits of a number, count its requests. To be called at every decision."""
        with self._lock:
            watch = self._watches.get(container)
        if watch is not None and watch.number is not None and watch.pointed != (watch.number, slots):
            watch.pointed = watch.number, slots
            self._kernel.point(watch.number, slots)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there may be no latencies of it; None where nothing is known to be wrong."""
        with self._lock:
            watch = self._watches.get(container)
        if watch is None:
            return PENDING
        if watch.refused:
            return self._settings.full
        return self._kernel.problem or watch.trouble

    def details(self, number: int) -> dict[str, int]:
        """What was seen of a watch beside its latencies; empty when it has ended."""
        return self._kernel.details(number)

    def tallies(self) -> dict[str, int]:
        """What the kernel side saw and missed since the start."""
        return self._kernel.tallies()

    def wake(self) -> None:
        """The next round begins at once."""
        self._worker.wake()

    def close(self) -> None:
        """Ends the thread and detaches every probe."""
        self._worker.close()
        self._kernel.unload()

    def step(self) -> float:
        """One round: follows the processes that are there, unfollows the others. For the thread."""
        now_ns = monotonic_ns()
        watches, ended = self._current(now_ns)
        if not watches and self._settings.idle_ns is not None:
            self._kernel.unload()
        for watch in ended:
            self._processes.forget(watch.container.key)
            self._end(watch)
        if watches:
            self._load(watches.values(), now_ns)
        probes = self._kernel.probes
        if probes is not None:
            self._admit(probes, watches)
            self._follow_all(probes, [watch for watch in watches.values() if watch.number is not None], now_ns)
            probes.drop_unused()
        return _ROUND_SECONDS

    def _current(self, now_ns: int) -> tuple[dict[ContainerKey, _Watch[S]], list[_Watch[S]]]:
        """What is watched, and what is not any more since the last round."""
        idle_ns = self._settings.idle_ns
        with self._lock:
            for key, watch in list(self._watches.items()):
                if idle_ns is not None and now_ns - watch.asked_ns > idle_ns:
                    self._ended.append(self._watches.pop(key))
            ended, self._ended = self._ended, []
            return dict(self._watches), ended

    def _load(self, watches: Collection[_Watch[S]], now_ns: int) -> None:
        try:
            self._kernel.load(now_ns)
        except WardenError:  # it is logged
            for watch in watches:
                self._count(watch, "load")

    def _end(self, watch: _Watch[S]) -> None:
        number, watch.number = watch.number, None
        if self._kernel.probes is not None and number is not None:
            self._kernel.probes.end(number)

    def _admit(self, probes: ProcessProbes[S], watches: Mapping[ContainerKey, _Watch[S]]) -> None:
        """Ends the watches that are not admitted any more, then begins new ones."""
        admitted: Collection[ContainerKey] = watches.keys()
        if self._settings.admit is not None:
            begun = [key for key, watch in watches.items() if watch.number is not None]
            admitted = set(self._settings.admit({key: watch.source for key, watch in watches.items()}, begun))
        self._refuse(watches, admitted)
        for key in admitted:
            watch = watches[key]
            if watch.number is None:
                self._begin(probes, watch)

    def _begin(self, probes: ProcessProbes[S], watch: _Watch[S]) -> None:
        number = next(self._numbers)
        try:
            probes.begin(number, watch.source)
        except OSError as error:  # there is no room in a map; it is retried in the next round
            self._count(watch, "failed")
            watch.trouble = str(error)
        else:
            watch.number = number

    def _refuse(self, watches: Mapping[ContainerKey, _Watch[S]], admitted: Collection[ContainerKey]) -> None:
        """Each container is counted once; the log has a line when there begin to be any."""
        was_full = any(watch.refused for watch in watches.values())
        for key, watch in sorted(watches.items()):
            if (refused := key not in admitted) and not watch.refused:
                self._count(watch, "full")
                self._end(watch)
                if not was_full:
                    _log.error("%s: %s is not watched", self._settings.full, key)
                was_full = True
            watch.refused = refused

    def _follow_all(self, probes: ProcessProbes[S], watches: Collection[_Watch[S]], now_ns: int) -> None:
        dropped = probes.drop_changed()
        followed = probes.followed()  # before the look: a process that is forked after it did not leave its container
        found = [(watch, self._tgids_of(watch)) for watch in watches]
        current = {tgid: watch.number for watch, tgids in found for tgid in tgids}
        for tgid, number in followed.items():  # first: its pid may be a process of another container by now
            if current.get(tgid) != number:
                probes.unfollow(tgid)
        for watch, tgids in found:
            new = self._identified(watch, {tgid for tgid in tgids if followed.get(tgid) != watch.number})
            watch.retry_ns = {process: at for process, at in watch.retry_ns.items() if process in new}
            for process in new:
                if process.tgid in dropped:
                    watch.retry_ns[process] = now_ns + _RETRY_NS  # the writer may not be done yet
                else:
                    self._follow(probes, watch, process, now_ns)
            before = sum(followed.get(tgid) == watch.number for tgid in tgids)
            self._note_trouble(watch, before + len(new))

    def _tgids_of(self, watch: _Watch[S]) -> set[int]:
        if watch.only is not None:
            return {process.tgid for process in watch.only}
        return self._processes.of(watch.container)

    def _identified(self, watch: _Watch[S], tgids: Collection[int]) -> set[ProcessId]:
        """Those of the processes that still run."""
        if watch.only is not None:
            return {process for process in watch.only if process.tgid in tgids}
        found = set()
        for tgid in tgids:
            with suppress(GoneError, SetupError):  # it ended, or may not be looked at
                found.add(self._proc.process_id(tgid))
        return found

    def _follow(self, probes: ProcessProbes[S], watch: _Watch[S], process: ProcessId, now_ns: int) -> None:
        if watch.number is None or now_ns < watch.retry_ns.get(process, 0):
            return
        try:
            probes.follow(watch.number, watch.source, process)
            watch.retry_ns.pop(process, None)
        except (GoneError, ProbeError, SetupError, OSError) as error:
            watch.retry_ns[process] = now_ns + _RETRY_NS
            watch.trouble = str(error)
            self._count(watch, _REASONS.get(type(error), "failed"))

    def _note_trouble(self, watch: _Watch[S], processes: int) -> None:
        """One process that is followed is enough; a reason why none is goes to the log once."""
        if not processes:
            watch.trouble = f"no process of {watch.container.key} was found"
        elif len(watch.retry_ns) < processes:
            watch.trouble = watch.logged = None
        elif watch.trouble != watch.logged:
            watch.logged = watch.trouble
            _log.warning("signal %s: %s", self._settings.signal, watch.trouble)

    def _count(self, watch: _Watch[S], reason: str) -> None:
        """Sources come from pods' annotations, too, so there may be any number of them: the first have a label each."""
        self.failed += 1
        if (watch.source, reason) in self.failures or len(self.failures) < _MOST_COUNTED:
            self.failures[watch.source, reason] += 1
