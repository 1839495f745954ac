# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Reading the figures, solving and learning, in a process of its own: seconds of Python that no request is to wait for.

Invariant: a process that died, or took longer than LONGEST_S, is a failed plan and is replaced at the next one. It ends
when the service does, also when that is killed: its pipe ends then.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final

from fleet.learning import Learner, Lessons
from fleet.match.plan import Plan, solve
from fleet.model import FleetError, Job, Predictor
from fleet.sources.prometheus import Found, Query, Settings, find_slots, prometheus
from fleet.sources.windows import Running
from fleet.weights.experience import Experience
from fleet.weights.table import Table

LONGEST_S: Final = 300.0
_NICER: Final = 5
"""A plan may take a little longer where CPUs are short, a request not"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where slots come from, and what a pair is worth."""

    prometheus: str
    """URL"""
    settings: Settings
    predictor: str
    """Name in BUILTIN"""
    table: Table
    """Of measured pairs, to begin with"""
    learn_over_s: float = 600.0
    """Of one measurement"""


@dataclass(frozen=True, slots=True)
class Question:
    """What a plan is made for."""

    jobs: Sequence[Job]
    held: frozenset[str]
    """GPUs that have a pod, whatever Prometheus says"""
    running: Mapping[str, Running]
    """Namespace/name → pod: of those that have a GPU, or had one until lately"""


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, and what it is made of."""

    plan: Plan
    predictor: Predictor
    """That it was made with"""
    lessons: Lessons
    found: Found
    """Without the GPUs that have a pod"""
    seconds: Mapping[str, float]
    """Step → how long it took"""


def make(source: Source, asked: Question, learner: Learner) -> Made:
    """One plan."""
    begun_s = time.monotonic()
    found = find_slots(prometheus(source.prometheus), source.settings)
    read_s = time.monotonic()
    free = replace(found, slots=tuple(slot for slot in found.slots if slot.gpu not in asked.held))
    predictor = learner.predictor(source.predictor, time.time())
    plan = solve(free.slots, asked.jobs, predictor)
    steps = {"figures": read_s - begun_s, "solve": time.monotonic() - read_s}
    return Made(plan, predictor, learner.lessons(time.time()), free, steps)


class Solver:
    """For one thread; `close` may come from another."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._child: tuple[SpawnProcess, Connection] | None = None

    def start(self) -> None:
        """The process, which takes a second: a first plan needs not wait for that."""
        self._running()

    def solve(self, asked: Question) -> Made:
        """As `make`."""
        child, connection = self._running()
        try:
            connection.send(asked)
            if not connection.poll(LONGEST_S):
                raise EOFError(f"it took longer than {LONGEST_S:g} s")
            made = connection.recv()
        except (OSError, EOFError) as error:
            self.close()
            raise FleetError(
                f"the process that plans ended: {error or child.exitcode}; it is started again", 3
            ) from error
        if isinstance(made, Made):
            return made
        raise FleetError(str(made), 3)

    def _running(self) -> tuple[SpawnProcess, Connection]:
        with self._lock:
            if self._child is None:
                context = multiprocessing.get_context("spawn")
                mine, others = context.Pipe()
                process = context.Process(target=_serve, args=(others, self._source), name="planner", daemon=True)
                process.start()
                others.close()
                self._child = process, mine
            return self._child

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child[0].kill()
            child[0].join()
            child[1].close()


def _serve(connection: Connection, source: Source) -> None:
    """Of the process: a plan for each question, until the service is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all: the service ends this one
    os.nice(_NICER)
    with contextlib.suppress(ImportError):  # the first plan says so
        importlib.import_module("scipy.optimize")
    learner = Learner(Experience(source.table), _at(source), source.learn_over_s, time.time())
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = connection.recv()
            try:
                answer: Made | str = make(source, asked, learner)
            except FleetError as error:
                answer = str(error)
            connection.send(answer)
            while not connection.poll() and learner.advance(asked.running, time.time()):
                pass


def _at(source: Source) -> Callable[[float], Query]:
    return lambda at_s: prometheus(source.prometheus, at_s=at_s)
