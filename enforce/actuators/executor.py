# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rungs beyond gate and pace, and those in force: what is done to whole containers, each with its entries first.

`want` takes once per decision what ought to be in force and returns at once; threads of its own climb and descend. Per
container one thing is done at a time. A rung that fails is reported and retried later; one that is no longer wanted is
undone the same way as after a crash, from its entries. What is in force is applied again now and then, and at once when
the container has other processes: so what another program has undone is found, and new processes are held too. Until a
rung is applied, nothing is done to any container. MPS servers are watched for faults only when enforcing, as a fault is
acted upon where it is seen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import WardenError
from agent.core.model import ContainerKey, ProcessId, Snapshot
from agent.node.procfs import this_boot
from agent.observer import Observer
from enforce.actuators.checkpoint.helper import DriverLibrary
from enforce.actuators.checkpoint.rungs import Checkpoints, Lock, Swap
from enforce.actuators.evict import Evict
from enforce.actuators.freezer.rung import Freeze
from enforce.actuators.ladder import Reasons, UnfinishedError
from enforce.actuators.mps.clients import AllClients
from enforce.actuators.mps.faults import FaultMonitor
from enforce.actuators.mps.rung import Mps
from enforce.actuators.mps.survey import MpsSurvey
from enforce.actuators.undo import undo
from enforce.ledger.entries import LedgerEntry
from enforce.ledger.ledger import Ledger
from enforce.model import Rung, Subject
from enforce.workloads import Workload

_log = logging.getLogger(__name__)
_THREADS = 4
RETRY_NS = 5 * NS_PER_SECOND
AGAIN_NS = 2 * NS_PER_SECOND
UNFINISHED_NS = NS_PER_SECOND // 4
Wanted = Mapping[ContainerKey, tuple[Subject, frozenset[str]]]


@dataclass(slots=True)
class _ContainerRungs:
    """What is done to one container. Changed by at most one thread at a time."""

    in_force: dict[str, list[LedgerEntry]] = field(default_factory=dict)  # rung → entries; empty: nothing to undo
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)  # rung → when, why
    again_ns: dict[str, int] = field(default_factory=dict)  # rung → when to apply it again
    processes: dict[str, tuple[ProcessId, ...]] = field(default_factory=dict)  # rung → those it was applied to
    busy: bool = False


class RungExecutor:
    """Owns what is in force. `want` and the readers are for one thread, the deciding one."""

    def __init__(self, table: Mapping[str, Rung], ledger: Ledger, clock: Callable[[], int] = monotonic_ns) -> None:
        self.table = table
        self._ledger, self._clock, self._boot = ledger, clock, this_boot()
        self._containers: dict[ContainerKey, _ContainerRungs] = {}
        self._wanted: Wanted = {}  # of the last `want`; replaced, never changed
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rung")
        self._ending = threading.Event()
        self._no_threads_until_ns = 0  # no thread could be made: not tried before then
        self.failures = 0
        self._adopt()

    def want(self, wanted: Wanted) -> None:
        """What ought to be in force now, for every container; a container that is not named is released."""
        self._wanted = wanted
        for key in list(self._containers.keys() - wanted.keys()):
            self._start(key, None, frozenset())
        for key, (subject, names) in wanted.items():
            self._start(key, subject, names)

    def in_force(self, key: ContainerKey) -> frozenset[str]:
        """The rungs that hold the container now."""
        rungs = self._containers.get(key)
        return frozenset(rungs.in_force) if rungs else frozenset()

    def troubles(self, key: ContainerKey) -> Mapping[str, str]:
        """Rung → why it could not be done the last time."""
        rungs = self._containers.get(key)
        return {name: why for name, (_, why) in dict(rungs.failed).items()} if rungs else {}

    def release_all(self) -> None:
        """Undoes everything that can be undone now, and waits for it, at the end. `want({})` does not wait."""
        self._wanted = {}
        self._ending.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rung")
        self._ending.clear()
        for rungs in self._containers.values():
            rungs.busy = False
            for name in list(rungs.in_force):
                self._descend(rungs, name)
        self._containers = {key: rungs for key, rungs in self._containers.items() if rungs.in_force}

    def _adopt(self) -> None:
        """What an earlier agent left, and the start's release could not undo yet: undone here unless it is wanted."""
        for entry in self._ledger.outstanding():
            if entry.act in self.table:
                rungs = self._containers.setdefault(entry.container, _ContainerRungs())
                rungs.in_force.setdefault(entry.act, []).append(entry)

    def _start(self, key: ContainerKey, subject: Subject | None, names: frozenset[str]) -> None:
        rungs = self._containers.get(key)
        if rungs is None:
            if not names:
                return
            rungs = self._containers[key] = _ContainerRungs()
        now = self._clock()
        if rungs.busy or now < self._no_threads_until_ns:
            return
        again = {name for name in names if self._is_due(rungs, subject, name, now)}
        over = {name for name in rungs.in_force.keys() - names if self._may_try(rungs, name, now)}
        if not again and not over:
            if not rungs.in_force and not names:
                del self._containers[key]
            return
        rungs.busy = True
        self._submit(rungs, lambda: self._move(key, rungs, again, over))

    def _submit(self, rungs: _ContainerRungs, move: Callable[[], None]) -> None:
        """The pool queues a move before it makes a thread for it. If it cannot, an older thread may run it."""
        unclaimed = threading.Lock()  # taken by the one that runs the move, or gives it up

        def run() -> None:
            if unclaimed.acquire(blocking=False):
                move()

        try:
            self._pool.submit(run)
        except RuntimeError as error:  # no memory, or as many threads as there may be
            self.failures += 1
            self._no_threads_until_ns = self._clock() + AGAIN_NS
            _log.error("no thread can be started that acts on containers, tried again: %s", error)
            if unclaimed.acquire(blocking=False):
                rungs.busy = False

    def _is_due(self, rungs: _ContainerRungs, subject: Subject | None, name: str, now_ns: int) -> bool:
        if not self._may_try(rungs, name, now_ns):
            return False
        if name not in rungs.in_force or subject is None:
            return True
        return now_ns >= rungs.again_ns.get(name, 0) or subject.processes != rungs.processes.get(name)

    def _may_try(self, rungs: _ContainerRungs, name: str, now_ns: int) -> bool:
        failed = rungs.failed.get(name)
        return failed is None or now_ns - failed[0] >= RETRY_NS

    def _move(self, key: ContainerKey, rungs: _ContainerRungs, climb: set[str], descend: set[str]) -> None:
        """Waiting for a thread and descending may take minutes: what is climbed is what is wanted by then."""
        try:
            for name in descend:
                self._descend(rungs, name)
            for name in climb:
                subject, names = self._wanted.get(key, (None, frozenset()))
                if subject is not None and name in names and not self._ending.is_set():
                    self._climb(rungs, subject, name)
        except Exception:  # noqa: BLE001  # nothing else sees an exception of a thread
            self.failures += 1
            _log.exception("acting on %s failed", key)
        finally:
            rungs.busy = False

    def _climb(self, rungs: _ContainerRungs, subject: Subject, name: str) -> None:
        """Also for a rung that is in force: applies it again. Its entries stay the same ones."""
        rung = self.table[name]
        obstacle = None if name in rungs.in_force else rung.obstacle(subject)
        if obstacle is not None:
            rungs.failed[name] = (self._clock(), obstacle)
            return
        known = {entry.id: entry for entry in rungs.in_force.get(name, [])}
        again_ns = AGAIN_NS
        try:
            for entry in rung.intents(subject):
                self._ledger.intend(known.setdefault(entry.id, entry))
            rung.apply(subject)
        except UnfinishedError:
            again_ns = UNFINISHED_NS
        except (OSError, WardenError) as error:
            self._fail(rungs, subject, name, list(known.values()), str(error))
            return
        except Exception as error:  # noqa: BLE001  # a fault of the rung's: what it has done is undone all the same
            _log.exception("%s: %s", subject.container.name, name)
            self._fail(rungs, subject, name, list(known.values()), repr(error))
            return
        rungs.failed.pop(name, None)
        if name not in rungs.in_force:
            _log.info("%s: %s", subject.container.name, name)
        rungs.again_ns[name] = self._clock() + again_ns
        rungs.processes[name] = subject.processes
        rungs.in_force[name] = self._as_written(known.values())  # last: readers do not wait for this thread

    def _fail(self, rungs: _ContainerRungs, subject: Subject, name: str, entries: list[LedgerEntry], why: str) -> None:
        """Part of it may be in force: all of it is undone."""
        self.failures += 1
        rungs.failed[name] = (self._clock(), why)
        _log.warning("%s: %s: %s", subject.container.name, name, why)
        rungs.in_force[name] = self._as_written(entries)
        self._descend(rungs, name)

    def _as_written(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        """As the ledger has them: a rung may know more of an act once it is applied."""
        try:
            written = {entry.id: entry for entry in self._ledger.outstanding()}
        except WardenError as error:
            _log.warning("%s", error)
            written = {}
        return [written.get(entry.id, entry) for entry in entries]

    def _descend(self, rungs: _ContainerRungs, name: str) -> None:
        left = []
        for entry in rungs.in_force.get(name, []):
            undone = undo(entry, self._boot)
            if not undone.closed:
                left.append(entry)
                rungs.failed[name] = (self._clock(), f"not undone yet: {undone.error or undone.outcome}")
                continue
            try:
                self._ledger.done(entry.id)
            except WardenError as error:  # it stays outstanding: undoing it again does no harm
                _log.warning("%s", error)
        if left:
            rungs.in_force[name] = left
        else:
            rungs.in_force.pop(name, None)


@dataclass(frozen=True, slots=True)
class RungRegistry:
    """The rungs by name. `look` is to be called at every decision."""

    table: Mapping[str, Rung]
    freeze: Freeze
    mps: Mps
    faults: FaultMonitor | None  # None: not enforcing

    @classmethod
    def of(cls, observer: Observer, ledger: Ledger | None) -> Self:
        """Without a ledger no rung may be applied: then they are only asked for their obstacles."""
        proc = observer.proc

        def others(container: ContainerKey) -> frozenset[int]:
            members = observer.members.all()
            return frozenset(member.process.id.tgid for member in members if member.container.key != container)

        survey = MpsSurvey(proc)
        checkpoints = Checkpoints(ledger, DriverLibrary(observer.libcuda), proc)
        freeze, mps = Freeze(proc, others), Mps(proc, survey)
        rungs: tuple[Rung, ...] = (
            freeze,
            mps,
            Lock(checkpoints),
            Swap(checkpoints, device_bytes=lambda key: _device_bytes(observer.snapshot(), key)),
            Evict(proc, AllClients(proc)),
        )
        faults = FaultMonitor(survey) if ledger is not None else None
        return cls({rung.name: rung for rung in rungs}, freeze, mps, faults)

    def look(self, workloads: Mapping[ContainerKey, Workload], snapshot: Snapshot) -> dict[ContainerKey, Reasons]:
        """Has MPS surveyed where a rule is about it; the containers that a fault of MPS has evicted. Does not block."""
        self.mps.look(workloads, snapshot)
        if self.faults is None:
            return {}
        self.faults.look(workloads, snapshot)
        return {key: {"evict": why} for key, why in self.faults.wanted.items()}

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost."""
        return {**self.mps.losses(), **(self.faults.losses() if self.faults else {})}

    def close(self) -> None:
        """Ends the thread of `freeze`, which thaws everything."""
        self.freeze.close()


def _device_bytes(snapshot: Snapshot | None, container: ContainerKey) -> int | None:
    """What the container holds on all devices; None where it is unknown on one of them."""
    rows = [row for row in snapshot.containers if row.container.key == container] if snapshot else []
    held = [usage.memory_bytes for row in rows for usage in row.usage]
    known = [one for one in held if one is not None]
    return sum(known) if held and len(known) == len(held) else None
