# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The service's plans: one each interval, and one soon after the set of waiting pods changed.

Invariant: a plan is made for pods that have no GPU and GPUs that have no pod at that moment, and what was given away
while it was made is taken out of it. Without figures there is no plan, and nothing new is placed until there are some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from fleet.exporter import Metrics
from fleet.extender.answers import Board
from fleet.extender.notices import Notices
from fleet.extender.state import Demand, State
from fleet.learning import Lessons
from fleet.model import FleetError
from fleet.plan import Result
from fleet.solver import Question, Solver, Source

AFTER_CHANGE_S: Final = 2.0
"""Pods of one Job come within moments of each other"""
AFTER_FAILURE_S: Final = 5.0
_LOOK_S: Final = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan is made of, beside the pods."""

    source: Source
    interval_s: float


class Planner:
    """One thread."""

    def __init__(self, inputs: Inputs, state: State, metrics: Metrics, notices: Notices) -> None:
        self._inputs, self._state, self._metrics, self._notices = inputs, state, metrics, notices
        self._solver = Solver(inputs.source)
        self.last: Result | None = None
        """Read by pages"""

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        next_s = 0.0
        self._solver.start()
        while not stop.wait(_LOOK_S):
            if not self._state.knows_pods():
                continue  # a plan for no pods would keep those that wait from theirs
            now_s, changed_s = time.monotonic(), self._state.changed_s()
            if now_s < next_s and (changed_s is None or now_s < changed_s + AFTER_CHANGE_S):
                continue
            pause_s = self._inputs.interval_s if self.round() else min(AFTER_FAILURE_S, self._inputs.interval_s)
            next_s = time.monotonic() + pause_s

    def close(self) -> None:
        """Ends the process that solves."""
        self._solver.close()

    def round(self) -> bool:
        """One plan. Whether it could be made."""
        demand = self._state.demand()
        try:
            self._plan(demand)
        except FleetError as error:
            self._state.trouble("plan", str(error))
            self._metrics.plan_failed()
            _log.warning("no plan: %s", error)
            return False
        return True

    def _plan(self, demand: Demand) -> None:
        begun_s = time.monotonic()
        made = self._solver.solve(Question(demand.waiting.jobs, demand.held, demand.running))
        plan, found = made.plan, made.found
        board = Board.of(plan, made.predictor)
        name = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._state.adopt(board, demand, name)
        self.last = Result(plan, found, demand.waiting, Counter())
        self._notices.wake(self._state.to_wake(frozenset(one.job.key for one in plan.placed)), name)
        self._metrics.plan(plan, found, made.seconds, time.time())
        self._learned(made.lessons)
        _log.info(
            "plan %s: %d of %d waiting pods have a GPU, of %d; %.2f s",
            name,
            len(plan.placed),
            len(demand.waiting.jobs),
            len(found.slots),
            time.monotonic() - begun_s,
        )

    def _learned(self, lessons: Lessons) -> None:
        self._metrics.learned(lessons)
        if lessons.failure is not None:
            _log.warning("nothing was learned from the last window: %s", lessons.failure)
