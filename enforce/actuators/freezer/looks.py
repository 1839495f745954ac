# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether containers may be frozen, for the deciding thread, which must not wait for thousands of cgroups.

A container of a few cgroups is looked at in place. One of more is looked at by a thread, one container at a time, and
the deciding thread gets the last answer; the first time it is told to come again. So a tenant who makes cgroups by the
thousand costs the deciding thread AT_ONCE of them, and is frozen all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import WardenError
from agent.core.model import ContainerKey, ProcessId
from agent.core.worker import BackgroundJob
from agent.node.procfs import Procfs
from enforce.actuators.freezer.cgroup import FreezerCgroup, NotFreezableError, TooManyCgroupsError, freezable
from enforce.model import Subject

AT_ONCE: Final = 32
FRESH_NS: Final = 2 * NS_PER_SECOND
_KEPT_NS = 60 * NS_PER_SECOND
LOOKING: Final = "its many cgroups are being looked at; tried again in a moment"


@dataclass(frozen=True, slots=True)
class _Answer:
    at_ns: int
    processes: tuple[ProcessId, ...]
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
        """As `freezable`, in bounded time. NotFreezableError, OSError."""
        key = subject.container.key
        try:
            return freezable(subject, self._proc, self._others(key), AT_ONCE)
        except TooManyCgroupsError:
            answer = self._answers.get(key)
        if (answer is None or self._clock() - answer.at_ns > FRESH_NS) and not self._job.running:
            self._wanted = subject
            self._job.start()
        if answer is None or answer.processes != subject.processes:
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
        self._answers = {**kept, subject.container.key: _Answer(now, subject.processes, place)}
