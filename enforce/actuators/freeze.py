# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`freeze`: the container's cgroup stands still, CPU and all, by turns, so that the floor is kept.

A thread of its own takes the turns, since decisions are too far apart for them. It freezes only what the deciding
thread allowed within the last second: one that hangs, or no longer wants it, freezes nobody. Who somebody else has
frozen or thawed is left alone for ten minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent import capabilities
from agent.clock import NS_PER_SECOND, monotonic_ns, wall_ns
from agent.errors import GoneError, WardenError
from agent.model import ContainerKey
from agent.procfs import Procfs
from enforce.duty import FROZEN_BY_OTHERS, IDLE_NS, Duty, ForeignWriterError
from enforce.entries import Entry
from enforce.freezable import NotFreezableError, freezable
from enforce.freezer import MARKING, Cgroup, Mark, Place
from enforce.model import Subject

_log = logging.getLogger(__name__)
LEASE_NS: Final = NS_PER_SECOND
PATIENCE_NS: Final = NS_PER_SECOND // 4  # or the longest pause, if that is longer
LEFT_ALONE_NS: Final = 600 * NS_PER_SECOND
_ROUND_SECONDS = 0.001
_MOST_LEFT_ALONE = 4096


@dataclass(slots=True)
class _Turns:
    """One container that takes turns."""

    place: Place
    duty: Duty

    def holds(self, place: Place) -> bool:
        """Whether it is that cgroup, and nobody has undone it meanwhile."""
        return self.place == place and self.duty.cgroup.marked() is Mark.OURS


class Freeze:
    """Owns the turns. `allow` is for the deciding thread, the rest for the threads of `enforce.rungs`."""

    name = "freeze"

    def __init__(
        self,
        proc: Procfs,
        others: Callable[[ContainerKey], Collection[int]],
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._proc, self._others, self._clock = proc, others, clock
        self._turns = threading.Condition()  # guards everything below
        self._allowed: Mapping[ContainerKey, bool] = {}
        self._allowed_at_ns = 0
        self._taking: dict[ContainerKey, _Turns] = {}
        self._places: dict[ContainerKey, Place] = {}
        self._left_alone: dict[Place, tuple[int, str]] = {}
        self._thread: threading.Thread | None = None
        self._ending = False
        self.foreign_writes = 0
        self.failures = 0

    def allow(self, containers: Mapping[ContainerKey, bool]) -> None:
        """Who may be frozen for the next second; True: without thawing in between. Nobody else is, from now on."""
        with self._turns:
            self._allowed, self._allowed_at_ns = containers, self._clock()
            if self._taking.keys() - containers.keys():
                self._turns.notify()

    def obstacle(self, subject: Subject) -> str | None:
        """See `enforce.model.Rung`."""
        if subject.rule.limits.floor_ratio >= 1:
            return "its rule's floor is the whole device"
        if not capabilities.holds(MARKING):
            return f"{MARKING} is missing, by which a cgroup that we froze is marked"
        try:
            place = freezable(subject, self._proc, self._others(subject.container.key))
            with self._turns:
                self._check_left_alone(place)
            with Cgroup(place) as cgroup:
                theirs = cgroup.is_touched() and cgroup.marked() is None
            return FROZEN_BY_OTHERS if theirs else None
        except (OSError, WardenError) as error:
            return str(error)

    def intents(self, subject: Subject) -> Sequence[Entry]:
        """The cgroup, as it is now."""
        place = freezable(subject, self._proc, self._others(subject.container.key))
        with self._turns:
            self._places[subject.container.key] = place
        return [Entry.at(self.name, str(place), subject.container.key, wall_ns())]

    def apply(self, subject: Subject) -> None:
        """Freezes, waits until everything stands still, and leaves the turns to the thread."""
        key = subject.container.key
        with self._turns:
            place = self._places[key]
            self._check_left_alone(place)
            if key in self._taking and self._taking[key].holds(place):
                return
            if self._lease(key) is None:
                raise NotFreezableError("it is no longer wanted")
            self._drop(key)
            turns = _Turns(place, Duty.under(subject.rule.limits, Cgroup(place)))
            self._taking[key] = turns
            self._begin(key, turns)
        self._await(key, turns)

    def close(self) -> None:
        """Takes no more turns, and thaws whoever is frozen."""
        with self._turns:
            self._allowed, self._ending = {}, True
            self._turns.notify()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, key: ContainerKey, turns: _Turns) -> None:
        """The first turn lasts until everything stood still once."""
        now = self._clock()
        try:
            turns.duty.start(now)
        except ForeignWriterError as error:
            self._leave_alone(turns.place, str(error))
            self._drop(key)
            raise
        except BaseException:
            self._drop(key)
            raise
        turns.duty.due_ns = now + max(PATIENCE_NS, turns.duty.frozen_ns)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="freeze", daemon=True)
            self._thread.start()

    def _await(self, key: ContainerKey, turns: _Turns) -> None:
        began, patience_ns = self._clock(), max(PATIENCE_NS, turns.duty.frozen_ns)
        while True:
            with self._turns:
                if self._taking.get(key) is not turns or not turns.duty.frozen:
                    raise NotFreezableError(f"not all of it stood still within {patience_ns / 1e6:.0f} ms")
                if turns.duty.cgroup.is_frozen():
                    turns.duty.due_ns = began + turns.duty.frozen_ns
                    self._turns.notify()
                    return
            time.sleep(_ROUND_SECONDS)

    def _lease(self, key: ContainerKey) -> bool | None:
        """Whether it may be frozen without thawing; None: not at all."""
        fresh = self._clock() - self._allowed_at_ns < LEASE_NS
        return self._allowed.get(key) if fresh else None

    def _run(self) -> None:
        with self._turns:
            try:
                while not self._ending:
                    due = [self._turn(key) for key in list(self._taking)]
                    self._turns.wait(max(0, min(due) - self._clock()) / 1e9 if due else None)
            finally:
                self._thread = None if not self._ending else self._thread
                self._allowed = {}
                for key in list(self._taking):
                    self._turn(key)
                    self._drop(key)

    def _turn(self, key: ContainerKey) -> int:
        """One container's; when it is to be looked at next."""
        turns, now, lease = self._taking[key], self._clock(), self._lease(key)
        try:
            going_on = turns.duty.turn(now, lease is not None, bool(lease))
        except GoneError:
            going_on = False
        except ForeignWriterError as error:
            _log.warning("%s: %s", key, error)
            self._leave_alone(turns.place, str(error))
            going_on = False
        except OSError as error:  # it may be frozen: tried again soon
            self.failures += 1
            _log.warning("freezing %s: %s", key, error)
            return now + IDLE_NS
        if not going_on or (key not in self._allowed and not turns.duty.frozen):
            self._drop(key)
            return now + IDLE_NS
        return turns.duty.next_ns(now, lease is not None, bool(lease))

    def _drop(self, key: ContainerKey) -> None:
        turns = self._taking.pop(key, None)
        if turns is not None:
            turns.duty.cgroup.close()

    def _check_left_alone(self, place: Place) -> None:
        until_ns, why = self._left_alone.get(place, (0, ""))
        if self._clock() < until_ns:
            raise ForeignWriterError(why)

    def _leave_alone(self, place: Place, why: str) -> None:
        self.foreign_writes += 1
        now = self._clock()
        self._left_alone = {place: till for place, till in self._left_alone.items() if till[0] > now}
        if len(self._left_alone) < _MOST_LEFT_ALONE:
            self._left_alone[place] = (now + LEFT_ALONE_NS, why)
