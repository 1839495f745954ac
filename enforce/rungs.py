# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rungs in force: what is done to whole containers, off the deciding thread, each with its ledger entries first.

`want` says once per decision what ought to be in force and returns at once; threads of its own climb and descend. Per
container one thing is done at a time. A rung that fails is reported and tried again later; one that is no longer wanted
is undone the same way as after a crash, from its entries. What is in force is applied again now and then, and at once
when the container has other processes: so whatever somebody else has undone is found, and new processes are held too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import WardenError
from agent.model import ContainerKey, ProcessId
from enforce.entries import Entry
from enforce.ledger import Ledger, this_boot
from enforce.model import Rung, Subject
from enforce.release import undo

_log = logging.getLogger(__name__)
_THREADS = 4
RETRY_NS = 5 * NS_PER_SECOND
AGAIN_NS = 2 * NS_PER_SECOND
UNFINISHED_NS = NS_PER_SECOND // 4
Wanted = Mapping[ContainerKey, tuple[Subject, frozenset[str]]]


class UnfinishedError(WardenError):
    """A rung is in force but not done: it is applied again soon. No trouble."""


@dataclass(slots=True)
class _Holding:
    """What is done to one container. Changed by its one worker at a time."""

    in_force: dict[str, list[Entry]] = field(default_factory=dict)  # rung → entries; empty: nothing to undo
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)  # rung → when, why
    again_ns: dict[str, int] = field(default_factory=dict)  # rung → when to apply it again
    processes: dict[str, tuple[ProcessId, ...]] = field(default_factory=dict)  # rung → those it was applied to
    busy: bool = False


class Rungs:
    """Owns what is in force. `want` and the readers are for one thread, the deciding one."""

    def __init__(self, table: Mapping[str, Rung], ledger: Ledger, clock: Callable[[], int] = monotonic_ns) -> None:
        self.table = table
        self._ledger, self._clock, self._boot = ledger, clock, this_boot()
        self._held: dict[ContainerKey, _Holding] = {}
        self._wanted: Wanted = {}  # as it was said last; replaced, never changed
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rung")
        self._ending = threading.Event()
        self.failures = 0
        self._adopt()

    def want(self, wanted: Wanted) -> None:
        """Says what ought to be in force now, for every container; whatever is not named is undone."""
        self._wanted = wanted
        for key in list(self._held.keys() - wanted.keys()):
            self._start(key, None, frozenset())
        for key, (subject, names) in wanted.items():
            self._start(key, subject, names)

    def in_force(self, key: ContainerKey) -> frozenset[str]:
        """The rungs that hold the container now."""
        holding = self._held.get(key)
        return frozenset(holding.in_force) if holding else frozenset()

    def troubles(self, key: ContainerKey) -> Mapping[str, str]:
        """Rung → why it could not be done the last time."""
        holding = self._held.get(key)
        return {name: why for name, (_, why) in dict(holding.failed).items()} if holding else {}

    def release_all(self) -> None:
        """Undoes everything that can be undone now, and waits for it: for the end. `want({})` does not wait."""
        self._wanted = {}
        self._ending.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rung")
        self._ending.clear()
        for holding in self._held.values():
            holding.busy = False
            for name in list(holding.in_force):
                self._descend(holding, name)
        self._held = {key: holding for key, holding in self._held.items() if holding.in_force}

    def _adopt(self) -> None:
        """What an earlier agent left, and the start's release could not undo yet: undone here unless it is wanted."""
        for entry in self._ledger.outstanding():
            if entry.act in self.table:
                holding = self._held.setdefault(entry.container, _Holding())
                holding.in_force.setdefault(entry.act, []).append(entry)

    def _start(self, key: ContainerKey, subject: Subject | None, names: frozenset[str]) -> None:
        holding = self._held.get(key)
        if holding is None:
            if not names:
                return
            holding = self._held[key] = _Holding()
        if holding.busy:
            return
        now = self._clock()
        again = {name for name in names if self._is_due(holding, subject, name, now)}
        over = {name for name in holding.in_force.keys() - names if self._may_try(holding, name, now)}
        if not again and not over:
            if not holding.in_force and not names:
                del self._held[key]
            return
        holding.busy = True
        self._pool.submit(self._move, key, holding, again, over)

    def _is_due(self, holding: _Holding, subject: Subject | None, name: str, now_ns: int) -> bool:
        if name not in holding.in_force or subject is None:
            return self._may_try(holding, name, now_ns)
        return now_ns >= holding.again_ns.get(name, 0) or subject.processes != holding.processes.get(name)

    def _may_try(self, holding: _Holding, name: str, now_ns: int) -> bool:
        failed = holding.failed.get(name)
        return failed is None or now_ns - failed[0] >= RETRY_NS

    def _move(self, key: ContainerKey, holding: _Holding, climb: set[str], descend: set[str]) -> None:
        """Waiting for a thread and descending may take minutes: what is climbed is what is wanted by then."""
        try:
            for name in descend:
                self._descend(holding, name)
            for name in climb:
                subject, names = self._wanted.get(key, (None, frozenset()))
                if subject is not None and name in names and not self._ending.is_set():
                    self._climb(holding, subject, name)
        except Exception:  # noqa: BLE001  # a thread's exception would be seen by nobody
            self.failures += 1
            _log.exception("acting on %s failed", key)
        finally:
            holding.busy = False

    def _climb(self, holding: _Holding, subject: Subject, name: str) -> None:
        """Also for a rung that is in force: applies it again. Its entries stay the same ones."""
        rung = self.table[name]
        obstacle = None if name in holding.in_force else rung.obstacle(subject)
        if obstacle is not None:
            holding.failed[name] = (self._clock(), obstacle)
            return
        known = {entry.id: entry for entry in holding.in_force.get(name, [])}
        again_ns = AGAIN_NS
        try:
            for entry in rung.intents(subject):
                self._ledger.intend(known.setdefault(entry.id, entry))
            rung.apply(subject)
        except UnfinishedError:
            again_ns = UNFINISHED_NS
        except (OSError, WardenError) as error:
            self._fail(holding, subject, name, list(known.values()), str(error))
            return
        holding.failed.pop(name, None)
        if name not in holding.in_force:
            _log.info("%s: %s", subject.container.name, name)
        holding.in_force[name] = list(known.values())
        holding.again_ns[name] = self._clock() + again_ns
        holding.processes[name] = subject.processes

    def _fail(self, holding: _Holding, subject: Subject, name: str, entries: list[Entry], why: str) -> None:
        """Half of it may be in force: all of it is undone."""
        self.failures += 1
        holding.failed[name] = (self._clock(), why)
        _log.warning("%s: %s: %s", subject.container.name, name, why)
        holding.in_force[name] = entries
        self._descend(holding, name)

    def _descend(self, holding: _Holding, name: str) -> None:
        left = []
        for entry in holding.in_force.get(name, []):
            undone = undo(entry, self._boot)
            if not undone.closed:
                left.append(entry)
                holding.failed[name] = (self._clock(), f"not undone yet: {undone.error or undone.outcome}")
                continue
            try:
                self._ledger.done(entry.id)
            except WardenError as error:  # it stays outstanding: undoing it again does no harm
                _log.warning("%s", error)
        if left:
            holding.in_force[name] = left
        else:
            holding.in_force.pop(name, None)
