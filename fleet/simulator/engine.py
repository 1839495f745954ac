# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The event loop: jobs come, run at the speed that their neighbours leave them, end; a policy decides in between.

Invariant: the GPU time that a job held is its work plus what sharing and restarts cost it. A gang runs at the pace of
its slowest GPU. Without an interval the policy is asked when something happened; with one, at the next multiple of it,
as schedulers do that work in rounds. An act that is impossible is a defect of the policy and ends the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.model import FleetError, TraceJob
from fleet.simulator.cluster import MOST_TENANTS, Act, Active, Cluster, Policy, Preempt, Share, Slowdown, Start, Wake
from fleet.simulator.outcome import Ended, Outcome

Progress = Callable[[int, int], None]
"""Is called with the numbers of jobs that ended and of all."""
_NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, apart from jobs and policy."""

    gpus: int
    slowdown: Slowdown
    gpus_per_node: int | None = None
    """None: where a job's GPUs lie does not matter"""
    interval_s: float | None = None
    """Of decisions; None: at once"""
    restart_s: float = 0.0
    """In which a preempted job holds its GPUs again but does not progress"""
    memory_bytes: int | None = None
    """Of a GPU"""

    def __post_init__(self) -> None:
        if self.gpus < 1 or (
            self.gpus_per_node is not None and (self.gpus_per_node < 1 or self.gpus % self.gpus_per_node)
        ):
            raise FleetError(f"{self.gpus} GPUs, {self.gpus_per_node} per node: give whole nodes of at least one GPU")
        if self.restart_s < 0 or (self.interval_s is not None and self.interval_s <= 0):
            raise FleetError("the interval has to be over 0 s and the restart cost at least 0 s")


class _Run:
    """A job's course. Times up to `at_s` are accounted for."""

    __slots__ = (
        "at_s", "attained_s", "end_s", "first_s", "gpus", "job", "number", "preempted", "rate", "remaining_s",
        "restart_left_s", "restarted_s", "since_s", "size", "slowed_s",
    )  # fmt: skip

    def __init__(self, number: int, job: TraceJob, size: int, work_s: float) -> None:
        self.number, self.job, self.size, self.remaining_s = number, job, size, work_s
        self.at_s = self.since_s = job.submit_s
        self.first_s: float | None = None
        self.end_s, self.rate, self.gpus, self.preempted = _NEVER, 1.0, tuple[int, ...](), 0
        self.attained_s = self.slowed_s = self.restart_left_s = self.restarted_s = 0.0

    def advance(self, now_s: float) -> None:
        """Accounts for the time until now; while it waits there is nothing to count."""
        elapsed_s, self.at_s = now_s - self.at_s, now_s
        if not self.gpus or elapsed_s <= 0:
            return
        restarting_s = min(elapsed_s, self.restart_left_s)
        self.restart_left_s -= restarting_s
        self.restarted_s += restarting_s
        worked_s = elapsed_s - restarting_s
        self.attained_s += elapsed_s
        self.remaining_s -= worked_s * self.rate
        self.slowed_s += worked_s * (1 - self.rate)

    def pace(self, rate: float, now_s: float) -> None:
        """Sets the speed from now on, relative to alone."""
        self.rate = rate
        self.end_s = now_s + self.restart_left_s + max(0.0, self.remaining_s) / rate

    def start(self, gpus: tuple[int, ...], now_s: float) -> None:
        """Gives it GPUs."""
        self.gpus, self.at_s, self.since_s = gpus, now_s, now_s
        self.first_s = now_s if self.first_s is None else self.first_s

    def stop(self, restart_s: float, now_s: float) -> None:
        """It has lost its GPUs before its end."""
        self.preempted += 1
        self.end_s, self.since_s, self.restart_left_s = _NEVER, now_s, restart_s

    def ended(self, now_s: float) -> Ended:
        """Its figures, at its end."""
        return Ended(
            job=self.job,
            size=self.size,
            start_s=now_s if self.first_s is None else self.first_s,
            end_s=now_s,
            held_s=self.attained_s,
            slowed_s=self.slowed_s,
            restarted_s=self.restarted_s,
            preemptions=self.preempted,
        )

    def view(self) -> Active:
        attained_gpu_s = self.attained_s * self.size
        return Active(self.number, self.job, self.size, self.remaining_s, attained_gpu_s, self.since_s, self.gpus)


class _Simulation:
    """The state between events."""

    def __init__(self, runs: Sequence[_Run], policy: Policy, setting: Setting) -> None:
        self._policy, self._setting, self._runs = policy, setting, runs
        self._tenants: list[tuple[int, ...]] = [()] * setting.gpus
        self._waiting: dict[int, Active] = {}
        self._running: dict[int, _Run] = {}
        self._pairs: dict[tuple[int, int], float] = {}  # slowdown of the first beside the second, of those that met
        self._come = 0
        self._due_s = _NEVER
        self._now_s = runs[0].job.submit_s if runs else 0.0
        self.ended: list[Ended] = []
        self.busy_gpu_s = self.tenant_gpu_s = 0.0

    def run(self, progress: Progress | None) -> None:
        """Until all jobs have ended that can; services never do."""
        total = sum(run.remaining_s < _NEVER for run in self._runs)
        while len(self.ended) < total and self._advance():
            happened = [self._end_those_due(), self._admit()]
            if any(happened):
                self._due_s = min(self._due_s, self._round_up(self._now_s))
                if progress is not None:
                    progress(len(self.ended), total)
            if self._now_s >= self._due_s:
                self._decide()

    def _advance(self) -> bool:
        """To the next event. False: there is none, as all that runs are services that no waiting job can share with."""
        arrival_s = self._runs[self._come].job.submit_s if self._come < len(self._runs) else _NEVER
        next_s = min(arrival_s, self._due_s, min((run.end_s for run in self._running.values()), default=_NEVER))
        if next_s == _NEVER and self._running:
            return False
        if next_s == _NEVER:
            keys = ", ".join(waiting.job.key for waiting in list(self._waiting.values())[:3])
            raise FleetError(f"policy {self._policy.name} left {keys} waiting on an idle cluster: this is a defect", 3)
        elapsed_s = max(0.0, next_s - self._now_s)
        self._now_s += elapsed_s
        self.busy_gpu_s += elapsed_s * sum(map(bool, self._tenants))
        self.tenant_gpu_s += elapsed_s * sum(map(len, self._tenants))
        for run in self._running.values():
            run.advance(self._now_s)
        return True

    def _end_those_due(self) -> bool:
        due = [run for run in self._running.values() if run.end_s <= self._now_s]
        for run in due:
            self._vacate(run)
            self.ended.append(run.ended(self._now_s))
        return bool(due)

    def _admit(self) -> bool:
        before = self._come
        while self._come < len(self._runs) and self._runs[self._come].job.submit_s <= self._now_s:
            run = self._runs[self._come]
            self._waiting[run.number] = run.view()
            self._come += 1
        return self._come > before

    def _round_up(self, when_s: float) -> float:
        interval_s = self._setting.interval_s
        return when_s if interval_s is None else math.ceil(when_s / interval_s) * interval_s

    def _decide(self) -> None:
        state = Cluster(
            tenants=tuple(self._tenants),
            waiting=tuple(self._waiting[number] for number in sorted(self._waiting)),
            running={number: run.view() for number, run in self._running.items()},
            gpus_per_node=self._setting.gpus_per_node or self._setting.gpus,
            slowdown=self._setting.slowdown,
            memory_bytes=self._setting.memory_bytes,
        )
        self._due_s = _NEVER
        for act in self._policy.step(state, self._now_s):
            self._carry_out(act, state)

    def _carry_out(self, act: Act, state: Cluster) -> None:
        match act:
            case Wake(at_s):
                self._require(at_s > self._now_s, f"wants to be asked at {at_s:g} s, which is past")
                self._due_s = min(self._due_s, self._round_up(at_s))
            case Preempt(number):
                self._require(number in self._running, f"preempts job {number}, which does not run")
                self._preempt(self._running[number])
            case Start(number, gpus) | Share(number, gpus):
                self._require(number in self._waiting, f"starts job {number}, which does not wait")
                self._check_gpus(self._runs[number], gpus, 0 if isinstance(act, Start) else MOST_TENANTS - 1)
                self._occupy(self._runs[number], gpus, state)

    def _check_gpus(self, run: _Run, gpus: tuple[int, ...], most_others: int) -> None:
        there = all(0 <= gpu < len(self._tenants) for gpu in gpus) and len(set(gpus)) == len(gpus) == run.size
        self._require(there, f"gives job {run.number}, which needs {run.size} GPUs, the GPUs {gpus}")
        room = all(len(self._tenants[gpu]) <= most_others for gpu in gpus)
        self._require(room, f"gives job {run.number} GPUs that have too many tenants")

    def _require(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise FleetError(f"policy {self._policy.name} {what}: this is a defect of the policy", 3)

    def _occupy(self, run: _Run, gpus: tuple[int, ...], state: Cluster) -> None:
        for number in {tenant for gpu in gpus for tenant in self._tenants[gpu]}:
            factors = state.pair(run.job, self._running[number].job)
            self._require(factors is not None, f"puts job {run.number} beside {number}, which are no pair")
            if factors is not None:
                self._pairs[run.number, number], self._pairs[number, run.number] = factors
        del self._waiting[run.number]
        self._running[run.number] = run
        run.start(gpus, self._now_s)
        for gpu in gpus:
            self._tenants[gpu] += (run.number,)
        self._pace_on(gpus)

    def _vacate(self, run: _Run) -> None:
        gpus, run.gpus = run.gpus, ()
        for gpu in gpus:
            self._tenants[gpu] = tuple(number for number in self._tenants[gpu] if number != run.number)
        del self._running[run.number]
        self._pace_on(gpus)

    def _preempt(self, run: _Run) -> None:
        self._vacate(run)
        run.stop(self._setting.restart_s, self._now_s)
        self._waiting[run.number] = run.view()

    def _pace_on(self, gpus: tuple[int, ...]) -> None:
        """Sets the speed of those that run on these GPUs."""
        for number in {tenant for gpu in gpus for tenant in self._tenants[gpu]}:
            run = self._running[number]
            others = {other for gpu in run.gpus for other in self._tenants[gpu] if other != number}
            run.pace(1 / max((self._pairs[number, other] for other in others), default=1.0), self._now_s)


def simulate(jobs: Sequence[TraceJob], policy: Policy, setting: Setting, progress: Progress | None = None) -> Outcome:
    """Runs a trace's jobs under a policy. Those that cannot be simulated are counted by reason.

    A part of a GPU is a whole one here. A job of infinite duration is a service: it takes part but has no figures.
    """
    dropped: Counter[str] = Counter()
    runs: list[_Run] = []
    for job in sorted(jobs, key=lambda job: job.submit_s):
        size = math.ceil(job.gpus)
        if job.duration_s is None:
            dropped["duration unknown"] += 1
        elif size > setting.gpus:
            dropped[f"asks for more than {setting.gpus} GPUs"] += 1
        else:
            runs.append(_Run(len(runs), job, size, job.duration_s))
    simulation = _Simulation(runs, policy, setting)
    simulation.run(progress)
    stuck = sum(run.remaining_s < math.inf for run in runs) - len(simulation.ended)
    dropped.update({"found no GPU that it may use": stuck} if stuck else {})
    return Outcome(
        policy=policy.name,
        gpus=setting.gpus,
        ended=tuple(simulation.ended),
        busy_gpu_s=simulation.busy_gpu_s,
        tenant_gpu_s=simulation.tenant_gpu_s,
        dropped=dropped,
    )
