# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Jobs, settings and policies for tests of the fleet's simulator."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from fleet.model import TraceJob
from fleet.simulator.cluster import Act, Cluster, Policy, Share, Start, Wake
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import Outcome
from fleet.simulator.slowdown import constant


def job(key: str, duration_s: float, submit_s: float = 0.0, gpus: float = 1, **others: object) -> TraceJob:
    """With what matters in most tests."""
    return TraceJob(key=key, submit_s=submit_s, gpus=gpus, duration_s=duration_s, **others)  # type: ignore[arg-type]


def run(policy: Policy, jobs: list[TraceJob], gpus: int = 1, factor: float = 1.5, restart_s: float = 0.0) -> Outcome:
    """On a cluster without nodes, without rounds."""
    return simulate(jobs, policy, Setting(gpus, constant(factor), restart_s=restart_s))


def ends_s(outcome: Outcome) -> dict[str, float]:
    """Key → end."""
    return {one.job.key: one.end_s for one in outcome.ended}


def mean_jct_s(outcome: Outcome) -> float:
    """Of a run in which jobs ended."""
    return sum(one.jct_s for one in outcome.ended) / len(outcome.ended)


@st.composite
def traces(draw: st.DrawFn, most_gpus: int = 8, at_once: bool = False) -> list[TraceJob]:
    """Some jobs, often many at once; lengths from nothing to a week."""
    lengths_s = st.one_of(st.integers(0, 50), st.floats(0, 604_800))
    shapes = draw(
        st.lists(
            st.tuples(lengths_s, st.integers(0, 0 if at_once else 200), st.integers(1, most_gpus)),
            min_size=1,
            max_size=14,
        )
    )
    return [job(str(place), *shape) for place, shape in enumerate(shapes)]


class Watched:
    """A policy that keeps every state that it was asked about."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.name = policy, policy.name
        self.states: list[Cluster] = []

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        self.states.append(state)
        return self._policy.step(state, now_s)


class Scripted:
    """Puts each job onto its GPUs at its time, or as soon as it has come."""

    name = "scripted"

    def __init__(self, script: Mapping[str, tuple[float, tuple[int, ...]]]) -> None:
        self._script = script

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        acts: list[Act] = []
        occupied = {gpu for gpu, tenants in enumerate(state.tenants) if tenants}
        for waiting in state.waiting:
            at_s, gpus = self._script[waiting.job.key]
            if at_s > now_s:
                acts.append(Wake(at_s))
                continue
            act = Share if occupied & set(gpus) else Start
            acts.append(act(waiting.number, gpus))
            occupied |= set(gpus)
        return tuple(acts)
