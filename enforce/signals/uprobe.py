# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`uprobe`: how long a function takes, from its call to its return, in all processes of a container.

Nothing is loaded before the first container with such a promise is there. A thread of its own looks for the containers'
processes and attaches what they run, for that takes long; the reading is one look into a map. What cannot be attached
is said once, counted, and tried again.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import GoneError, ProbeError, SetupError
from agent.model import HOST, Container, ContainerKey, ContainerUsage, ProcessId, Snapshot
from agent.procfs import Procfs
from enforce.model import Reading
from enforce.policy.model import Slo, Source, UprobeSource
from enforce.signals.calls import Calls
from enforce.signals.requests import Requests
from enforce.signals.window import Windows

_log = logging.getLogger(__name__)
_EACH_MS = 1000
_RETRY_NS = 5 * NS_PER_SECOND


class Living(Protocol):
    """Who finds a container's processes: agent.containers.residents.Residents."""

    def of(self, container: Container) -> set[int]:
        """Their tgids."""
        ...

    def forget(self, container: ContainerKey) -> None:
        """It is gone."""
        ...


@dataclass(slots=True)
class _Watch:
    """One container's function, and the processes in which it is timed: by which target each."""

    number: int
    container: Container
    source: UprobeSource
    begun: bool = False
    targets: dict[ProcessId, int] = field(default_factory=dict)
    retry_ns: dict[ProcessId, int] = field(default_factory=dict)  # of those that cannot be followed
    only: frozenset[ProcessId] | None = None  # of the pseudo-container of the host: those that use a GPU
    trouble: str | None = "its processes have not been looked for yet"
    told: str | None = None


class Uprobe:
    """`load` makes the kernel's side, `residents` finds containers' processes; both are called on the thread alone."""

    name = "uprobe"

    def __init__(self, load: Callable[[], Calls], residents: Living, proc: Procfs, requests: Requests) -> None:
        self._load, self._residents, self._proc = load, residents, proc
        self._windows = Windows(requests)
        self._snapshot: Snapshot | None = None
        self._rows: dict[ContainerKey, ContainerUsage] = {}
        self._lock = threading.Lock()
        self._watches: dict[ContainerKey, _Watch] = {}
        self._gone: list[_Watch] = []
        self._numbers = itertools.count(1)
        self._calls: Calls | None = None
        self._load_again_ns = 0
        self._failed_rounds = 0
        self._failures: Counter[tuple[Source, str]] = Counter()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uprobes", daemon=True)
        self._begun = False

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None while the window holds fewer than `min_samples` calls."""
        if not isinstance(slo.source, UprobeSource):
            return None
        if snapshot is not self._snapshot:  # one lasts for many readings
            self._snapshot = snapshot
            self._rows = {row.container.key: row for row in snapshot.containers}
        row = self._rows.get(container)
        watch = self._watches.get(container)
        if row is not None and (watch is None or watch.source != slo.source):
            watch = self._want(row.container, slo.source)
        if watch is None:
            return None
        if container == HOST and row is not None:
            watch.only = frozenset(row.processes)
        calls = self._calls
        buckets = calls.buckets(watch.number) if calls is not None and watch.begun else None
        return self._windows.read(container, {watch.number: buckets}, slo, now_ns)

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading, where it is more than silence."""
        watch = self._watches.get(container)
        return watch.trouble if watch is not None else None

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone; the thread takes their probes away."""
        with self._lock:
            for container in containers:
                self._windows.forget([container])
                if (watch := self._watches.pop(container, None)) is not None:
                    self._gone.append(watch)

    def failures(self) -> dict[tuple[Source, str], int]:
        """Processes in which the function could not be timed, since the start, by source and reason."""
        return dict(self._failures)

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost: calls that were not recorded, and rounds that failed. Empty where nothing was watched."""
        if not self._begun:
            return {}
        with self._lock:  # it may be closed at any moment
            tallies = self._calls.tallies() if self._calls is not None else {}
        return {**{f"uprobe:{name}": count for name, count in tallies.items()}, "uprobe:failed": self._failed_rounds}

    def close(self) -> None:
        """Takes every probe away."""
        self._ending.set()
        self._wake_up()
        if self._begun:
            self._thread.join()
        with self._lock:
            calls, self._calls = self._calls, None
            if calls is not None:
                calls.close()
        os.close(self._wake)

    def _want(self, container: Container, source: UprobeSource) -> _Watch:
        with self._lock:
            if (old := self._watches.pop(container.key, None)) is not None:
                self._gone.append(old)
                self._windows.forget([container.key])
            watch = self._watches[container.key] = _Watch(next(self._numbers), container, source)
        if not self._begun:
            self._begun = True
            self._thread.start()
        self._wake_up()
        return watch

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.look()
            except Exception:  # noqa: BLE001  # whatever a container's files do, the others' go on
                _log.exception("looking for functions to time failed; it is tried again")
                self._failed_rounds += 1
            self._wait()

    def _wait(self) -> None:
        """Until it is time, or a container is new, or a file is written over."""
        poll = select.poll()  # not select(2): our descriptors may be beyond its thousandth
        poll.register(self._wake, select.POLLIN)
        if self._calls is not None and (changes := self._calls.changes.fileno()) is not None:
            poll.register(changes, select.POLLIN)
        if any(descriptor == self._wake for descriptor, _ in poll.poll(_EACH_MS)):
            os.eventfd_read(self._wake)

    def look(self) -> None:
        """One round: whoever is wanted now is followed, whoever is not any more is left alone."""
        with self._lock:
            watches, gone, self._gone = dict(self._watches), self._gone, []
        if not watches and self._calls is None:
            return
        calls = self._loaded(watches.values())
        if calls is None:
            return
        self._leave(calls, gone)
        dropped = calls.changed()
        here = {container: self._processes(watch) for container, watch in watches.items()}
        for container, processes in here.items():  # first: a number that ended may be another process's already
            self._unfollow(calls, watches[container], processes, dropped)
        for container, processes in here.items():
            self._follow(calls, watches[container], processes)
        calls.retain({target for watch in watches.values() for target in watch.targets.values()})

    def _processes(self, watch: _Watch) -> set[ProcessId]:
        if watch.container.key == HOST:
            return set(watch.only or ())
        found = set()
        for tgid in self._residents.of(watch.container):
            try:
                process = self._proc.process_id(tgid)
            except (GoneError, SetupError):  # it ended, or may not be looked at
                continue
            if self._proc.is_alive(process):
                found.add(process)
        return found

    def _loaded(self, watches: Collection[_Watch]) -> Calls | None:
        if self._calls is None and monotonic_ns() >= self._load_again_ns:
            self._load_again_ns = monotonic_ns() + _RETRY_NS
            try:
                self._calls = self._load()
            except (ProbeError, SetupError) as error:
                for watch in watches:
                    self._fail(watch, "load", str(error))
        return self._calls

    def _leave(self, calls: Calls, gone: Iterable[_Watch]) -> None:
        for watch in gone:
            self._residents.forget(watch.container.key)
            for process in watch.targets:
                calls.unfollow(process)
            if watch.begun:
                calls.end(watch.number)

    def _unfollow(self, calls: Calls, watch: _Watch, processes: set[ProcessId], dropped: set[int]) -> None:
        for process, target in list(watch.targets.items()):
            if process not in processes or target in dropped:
                calls.unfollow(process)
                del watch.targets[process]
            if target in dropped:
                watch.retry_ns[process] = monotonic_ns() + _RETRY_NS  # whoever writes may not be done yet

    def _follow(self, calls: Calls, watch: _Watch, processes: set[ProcessId]) -> None:
        if not watch.begun:
            calls.begin(watch.number)
            watch.begun = True
        watch.retry_ns = {process: at for process, at in watch.retry_ns.items() if process in processes}
        for process in processes - watch.targets.keys():
            self._try(calls, watch, process)
        if watch.targets:
            watch.trouble = watch.told = None
        elif not processes:
            watch.trouble = "no process of the container is found"

    def _try(self, calls: Calls, watch: _Watch, process: ProcessId) -> None:
        if monotonic_ns() < watch.retry_ns.get(process, 0):
            return
        try:
            watch.targets[process] = calls.follow(process, watch.source, watch.number)
            watch.retry_ns.pop(process, None)
        except (GoneError, ProbeError, SetupError, OSError) as error:
            watch.retry_ns[process] = monotonic_ns() + _RETRY_NS
            what = "write slo.binary as the container sees it" if isinstance(error, GoneError) else ""
            self._fail(
                watch, _REASONS.get(type(error), "failed"), f"{watch.source.binary}: {error}; {what}".rstrip("; ")
            )

    def _fail(self, watch: _Watch, reason: str, trouble: str) -> None:
        self._failures[watch.source, reason] += 1
        watch.trouble = trouble
        if watch.told != trouble and not watch.targets:  # once; one process in which it is timed is enough
            watch.told = trouble
            _log.warning("signal uprobe: %s", trouble)


_REASONS: dict[type[BaseException], str] = {GoneError: "no_binary", ProbeError: "refused", SetupError: "not_allowed"}
