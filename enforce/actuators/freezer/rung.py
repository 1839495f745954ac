# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`freeze`: the container's cgroup is frozen and thawed by turns, so that the floor is kept.

`FreezeCycle` is the cycle of one cgroup: frozen no longer than the rule's longest pause, then thawed for at least the
floor's part of the time. Two signs end it: our mark is gone (the freeze was undone from the ledger), or the state is
not the one that we wrote (another writer's: left alone for ten minutes).

A freeze may be undone at any moment, also just before we freeze. So a cgroup is marked once, at the start, and never
over the mark of a process that undoes it; after each freeze the mark is read again, and where it is gone the cgroup is
thawed at once. A cgroup that is frozen without a mark would never be thawed.

`Freeze` is the rung. Decisions are too far apart for the cycles, so a thread steps them. It freezes only what the
deciding thread allowed within the last second: if that thread hangs, nothing stays frozen.

`Looks` finds the cgroup for the deciding thread, which must not wait for thousands of them. A container of up to
AT_ONCE cgroups is looked at in place, one of more by a thread, one container at a time: the deciding thread gets the
last answer, and before the first one it is asked to come again. So a tenant who makes cgroups by the thousand costs the
deciding thread AT_ONCE of them, and is frozen all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.core.errors import GoneError, WardenError
from agent.core.model import ContainerKey
from agent.core.worker import BackgroundJob, Worker
from agent.node import preflight
from agent.node.procfs import Procfs
from enforce.actuators.freezer.cgroup import (
    MARKING,
    Cgroup,
    FreezerCgroup,
    Mark,
    NotFreezableError,
    TooManyCgroupsError,
    freezable,
)
from enforce.ledger.entries import LedgerEntry
from enforce.model import Subject
from enforce.policy.model import Limits

_log = logging.getLogger(__name__)
MIN_THAWED_NS: Final = 10_000_000  # shorter ones would be lost in the time that waking up takes
IDLE_NS: Final = 50_000_000
LEASE_NS: Final = NS_PER_SECOND
FREEZE_TIMEOUT_NS: Final = NS_PER_SECOND // 4  # or the longest pause, if that is longer
LEFT_ALONE_NS: Final = 600 * NS_PER_SECOND
FROZEN_BY_OTHERS: Final = "another writer has frozen it: left alone"
UNDONE: Final = "its freeze is being undone from the ledger: tried again later"
AT_ONCE: Final = 32
LOOKING: Final = "its many cgroups are being looked at; tried again in a moment"
_FRESH_NS: Final = 2 * NS_PER_SECOND
_KEPT_NS: Final = 60 * NS_PER_SECOND
_POLL_SECONDS = 0.001
_MOST_LEFT_ALONE = 4096


class ForeignWriterError(WardenError):
    """Another writer froze or thawed the cgroup. It is theirs from then on."""


@dataclass(slots=True)
class FreezeCycle:
    """One cgroup that is frozen and thawed by turns. Times are CLOCK_MONOTONIC ns."""

    cgroup: Cgroup
    frozen_ns: int  # how long at a time
    thawed_ns: int
    frozen: bool = False
    due_ns: int = 0  # when the next change is due
    unconfirmed: bool = False  # it was frozen, and the mark was not seen since

    @classmethod
    def under(cls, limits: Limits, cgroup: Cgroup) -> FreezeCycle:
        """With the times that a rule allows."""
        floor = min(0.99, limits.floor_ratio)
        thawed_ns = max(MIN_THAWED_NS, int(limits.max_pause_ns * floor / (1 - floor)))
        return cls(cgroup, limits.max_pause_ns, thawed_ns)

    def start(self, now_ns: int) -> None:
        """The first freeze. Raises ForeignWriterError, leaving no mark; NotFreezableError when it is being undone."""
        if self.cgroup.is_touched():
            raise ForeignWriterError(FROZEN_BY_OTHERS)
        if not self.cgroup.claim() or not self._freeze(now_ns):
            raise NotFreezableError(UNDONE)

    def step(self, now_ns: int, allowed: bool, steady: bool) -> bool:
        """Does what is due; `steady`: frozen without thawing in between.

        False: the freeze was undone from the ledger, and the cycle is over. Raises ForeignWriterError, OSError.
        """
        asked = self.cgroup.is_asked()
        if not self._is_ours():  # read after the state: a process that undoes it writes its mark first
            return False
        if asked != self.frozen:
            self.cgroup.unmark()
            was = "thawed" if self.frozen else "frozen"
            raise ForeignWriterError(f"another writer has {was} it: left alone")
        if self.frozen and (not allowed or (now_ns >= self.due_ns and not steady)):
            self.cgroup.thaw()
            self.frozen, self.due_ns = False, now_ns + self.thawed_ns
        elif not self.frozen and allowed and now_ns >= self.due_ns:
            return self._freeze(now_ns)
        return True

    def next_ns(self, now_ns: int, allowed: bool, steady: bool) -> int:
        """When to call `step` again."""
        return now_ns + IDLE_NS if not allowed or (self.frozen and steady) else self.due_ns

    def _freeze(self, now_ns: int) -> bool:
        self.cgroup.freeze()
        self.frozen, self.unconfirmed, self.due_ns = True, True, now_ns + self.frozen_ns
        return self._is_ours()

    def _is_ours(self) -> bool:
        if self.cgroup.marked() is Mark.OURS:
            self.unconfirmed = False  # a process that undoes it from now on thaws it after we froze it
            return True
        if self.unconfirmed:
            self.cgroup.thaw()
        self.frozen = self.unconfirmed = False
        return False


@dataclass(frozen=True, slots=True)
class _Answer:
    at_ns: int
    found: FreezerCgroup | str  # where, or why not


class Looks:
    """`place` is for one thread, the deciding one; `look` for any."""

    def __init__(
        self, proc: Procfs, others: Callable[[ContainerKey], Collection[int]], clock: Callable[[], int]
    ) -> None:
        self._proc, self._others, self._clock = proc, others, clock
        self._answers: dict[ContainerKey, _Answer] = {}
        self._wanted: Subject | None = None  # what the job looks at
        self._job = BackgroundJob("freeze-look", self._look_for_later, failed="a look at cgroups")

    def place(self, subject: Subject) -> FreezerCgroup:
        """As `freezable`, in bounded time; of many cgroups as of the last look, whatever processes have come and gone
        since: before anything is done, `look` looks again. NotFreezableError, OSError."""
        key = subject.container.key
        try:
            return freezable(subject, self._proc, self._others(key), AT_ONCE)
        except TooManyCgroupsError:
            answer = self._answers.get(key)
        if (answer is None or self._clock() - answer.at_ns > _FRESH_NS) and not self._job.running:
            self._wanted = subject
            self._job.start()
        if answer is None:
            raise NotFreezableError(LOOKING)
        if isinstance(answer.found, str):
            raise NotFreezableError(answer.found)
        return answer.found

    def look(self, subject: Subject) -> FreezerCgroup:
        """As `freezable`, however long it takes."""
        return freezable(subject, self._proc, self._others(subject.container.key))

    def _look_for_later(self) -> None:
        subject = self._wanted
        if subject is None:
            return
        place: FreezerCgroup | str
        try:
            place = self.look(subject)
        except (OSError, WardenError) as error:
            place = str(error)
        now = self._clock()
        kept = {key: answer for key, answer in self._answers.items() if now - answer.at_ns < _KEPT_NS}
        self._answers = {**kept, subject.container.key: _Answer(now, place)}


@dataclass(slots=True)
class _ActiveCycle:
    """The cycle of one container, and where its cgroup is."""

    place: FreezerCgroup
    cycle: FreezeCycle

    def holds(self, place: FreezerCgroup) -> bool:
        """Whether it is that cgroup, and the freeze was not undone meanwhile."""
        return self.place == place and self.cycle.cgroup.marked() is Mark.OURS


class Freeze:
    """Owns the cycles. `allow` is for the deciding thread, the rest for the threads of `enforce.actuators.executor`."""

    name = "freeze"

    def __init__(
        self,
        proc: Procfs,
        others: Callable[[ContainerKey], Collection[int]],
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._looks, self._clock = Looks(proc, others, clock), clock
        self._lock = threading.Lock()  # guards everything below
        self._allowed: Mapping[ContainerKey, bool] = {}
        self._allowed_at_ns = 0
        self._cycles: dict[ContainerKey, _ActiveCycle] = {}
        self._places: dict[ContainerKey, FreezerCgroup] = {}
        self._left_alone: dict[FreezerCgroup, tuple[int, str]] = {}  # until when, why
        self._worker = Worker("freeze", self._step_all, failed="freezing by turns")
        self.foreign_writes = 0
        self.failures = 0

    def allow(self, containers: Mapping[ContainerKey, bool]) -> None:
        """Which containers may be frozen for the next second, and no others; True: without thawing in between."""
        with self._lock:
            self._allowed, self._allowed_at_ns = containers, self._clock()
            if self._cycles.keys() - containers.keys():
                self._worker.wake()

    def obstacle(self, subject: Subject) -> str | None:
        """See `enforce.model.Rung`."""
        if subject.rule.limits.floor_ratio >= 1:
            return "its rule's floor is the whole device"
        if not preflight.holds(MARKING):
            return f"{MARKING} is missing, by which a cgroup that we froze is marked"
        try:
            place = self._looks.place(subject)
            with self._lock:
                self._check_left_alone(place)
            with Cgroup(place) as cgroup:
                theirs = cgroup.is_touched() and cgroup.marked() is None
            return FROZEN_BY_OTHERS if theirs else None
        except (OSError, WardenError) as error:
            return str(error)

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """The cgroup, as it is now."""
        place = self._looks.look(subject)
        with self._lock:
            self._places[subject.container.key] = place
        return [LedgerEntry.at(self.name, str(place), subject.container.key, wall_ns())]

    def apply(self, subject: Subject) -> None:
        """Freezes, waits until all of it is frozen, and leaves the rest of the cycle to the thread."""
        key = subject.container.key
        with self._lock:
            place = self._places[key]
            self._check_left_alone(place)
            if key in self._cycles and self._cycles[key].holds(place):
                return
            if self._lease(key) is None:
                raise NotFreezableError("it is no longer wanted")
            self._start_thread()
            self._drop(key)
            active = _ActiveCycle(place, FreezeCycle.under(subject.rule.limits, Cgroup(place)))
            self._cycles[key] = active
            self._begin(key, active)
        self._await(key, active)

    def close(self) -> None:
        """Ends every cycle, and thaws what is frozen."""
        with self._lock:
            self._allowed = {}
        self._worker.close()
        with self._lock:
            self._end_all()

    def _start_thread(self) -> None:
        """Before anything is frozen: without the thread it would not be thawed. NotFreezableError."""
        if self._worker.alive:
            return
        try:
            self._worker.start()
        except RuntimeError as error:  # no memory, or as many threads as there may be; or it was closed
            raise NotFreezableError(f"no thread can be started that thaws it: {error}") from error

    def _begin(self, key: ContainerKey, active: _ActiveCycle) -> None:
        """The first freeze lasts until all of it was frozen once."""
        now = self._clock()
        try:
            active.cycle.start(now)
        except ForeignWriterError as error:
            self._leave_alone(active.place, str(error))
            self._drop(key)
            raise
        except BaseException:
            self._drop(key)
            raise
        active.cycle.due_ns = now + max(FREEZE_TIMEOUT_NS, active.cycle.frozen_ns)
        self._worker.wake()

    def _await(self, key: ContainerKey, active: _ActiveCycle) -> None:
        cycle, began = active.cycle, self._clock()
        timeout_ns = max(FREEZE_TIMEOUT_NS, cycle.frozen_ns)
        while True:
            with self._lock:
                if self._cycles.get(key) is not active or not cycle.frozen:
                    raise NotFreezableError(f"not all of it was frozen within {timeout_ns / 1e6:.0f} ms")
                if cycle.cgroup.is_frozen():
                    cycle.due_ns = began + cycle.frozen_ns
                    self._worker.wake()
                    return
            time.sleep(_POLL_SECONDS)

    def _lease(self, key: ContainerKey) -> bool | None:
        """Whether it may be frozen without thawing; None: not at all."""
        fresh = self._clock() - self._allowed_at_ns < LEASE_NS
        return self._allowed.get(key) if fresh else None

    def _step_all(self) -> float | None:
        """One step of the thread. Whatever fails unexpectedly, nothing stays frozen."""
        with self._lock:
            try:
                due = [self._step(key) for key in list(self._cycles)]
            except BaseException:
                self._end_all()
                raise
            return max(0, min(due) - self._clock()) / 1e9 if due else None

    def _end_all(self) -> None:
        self._allowed = {}
        for key in list(self._cycles):
            try:
                self._step(key)
            except Exception:  # noqa: BLE001  # it must not keep the next one frozen
                self.failures += 1
                _log.exception("thawing %s failed: it is undone from the ledger", key)
            finally:
                self._drop(key)

    def _step(self, key: ContainerKey) -> int:
        """One container's; when its next one is due."""
        active, now, lease = self._cycles[key], self._clock(), self._lease(key)
        cycle = active.cycle
        try:
            continues = cycle.step(now, lease is not None, bool(lease))
        except GoneError:
            continues = False
        except ForeignWriterError as error:
            _log.warning("%s: %s", key, error)
            self._leave_alone(active.place, str(error))
            continues = False
        except OSError as error:  # it may be frozen: tried again soon
            self.failures += 1
            _log.warning("freezing %s: %s", key, error)
            return now + IDLE_NS
        if not continues or (key not in self._allowed and not cycle.frozen):
            self._drop(key)
            return now + IDLE_NS
        return cycle.next_ns(now, lease is not None, bool(lease))

    def _drop(self, key: ContainerKey) -> None:
        active = self._cycles.pop(key, None)
        if active is not None:
            active.cycle.cgroup.close()

    def _check_left_alone(self, place: FreezerCgroup) -> None:
        until_ns, why = self._left_alone.get(place, (0, ""))
        if self._clock() < until_ns:
            raise ForeignWriterError(why)

    def _leave_alone(self, place: FreezerCgroup, why: str) -> None:
        self.foreign_writes += 1
        now = self._clock()
        self._left_alone = {place: till for place, till in self._left_alone.items() if till[0] > now}
        if len(self._left_alone) < _MOST_LEFT_ALONE:
            self._left_alone[place] = (now + LEFT_ALONE_NS, why)
