# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Learning while the service runs: what each window of time that is over says of pairs and of promises.

Invariant: windows lie on a grid of the clock and are judged once, in their order, from what Prometheus remembers; so a
service that starts again learns the same from the last windows, at most MOST_BACK, of pods that still run. It never
delays a plan by more than one window's queries, and a window that cannot be read is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fleet.model import FleetError, Predictor
from fleet.sources.prometheus import Query
from fleet.sources.windows import Running, misses, sights
from fleet.weights.experience import Experience

MOST_BACK: Final = 36
"""Windows: three hours, where each is half of ten minutes"""


@dataclass(frozen=True, slots=True)
class Lessons:
    """What is reported of it."""

    errors: tuple[float, ...] = ()
    """Expected throughput less the measured one, of each pod in each window since the last report"""
    measured: int = 0
    """Pairs in the table"""
    penalised: int = 0
    """Pairs that are worth half at the moment"""
    failure: str | None = None
    """Why the last window could not be read"""


class Learner:
    """For one thread. `ask`: time since 1970 → queries about that time; `window_s`: of one measurement."""

    def __init__(self, experience: Experience, ask: Callable[[float], Query], window_s: float, now_s: float) -> None:
        self._experience, self._ask, self._window_s = experience, ask, window_s
        self._step_s = window_s / 2
        self._next = int(now_s // self._step_s) - MOST_BACK
        self._errors: list[float] = []
        self._failure: str | None = None

    def predictor(self, name: str, now_s: float) -> Predictor:
        """As it is known by now."""
        return self._experience.predictor(name, now_s)

    def advance(self, running: Mapping[str, Running], now_s: float) -> bool:
        """Judges the next window, if one is over. Whether there may be more."""
        self._next = max(self._next, int(now_s // self._step_s) - MOST_BACK)  # one that can never be read is left out
        end_s = self._next * self._step_s
        if end_s > now_s:
            return False
        try:
            if running:
                self._judge(self._ask(end_s), running, end_s)
            self._failure = None
        except FleetError as error:
            self._failure = str(error)
            return False
        self._next += 1
        return True

    def _judge(self, query: Query, running: Mapping[str, Running], end_s: float) -> None:
        """Half a window for promises, a whole one, each second time, for throughputs."""
        experience = self._experience.missed(misses(query, running, f"{self._step_s:.0f}s"), end_s)
        errors: tuple[float, ...] = ()
        if self._next % 2 == 0:
            found = sights(query, running, f"{self._window_s:.0f}s", self._window_s)
            experience, errors = experience.measured(found)
        self._experience = experience
        self._errors += errors

    def lessons(self, now_s: float) -> Lessons:
        """Since the last time."""
        errors, self._errors = tuple(self._errors), []
        penalties, pairs = self._experience.penalties, self._experience.table.pairs
        halved = sum(penalties.factor(pair, now_s) < 1.0 for pair in penalties.by_pair)
        return Lessons(errors, len(pairs), halved, self._failure)
