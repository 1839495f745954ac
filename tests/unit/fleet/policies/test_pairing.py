# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.model import Job, Slot, TraceJob, Weight
from fleet.policies.pairing import Pairing
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import Outcome
from fleet.simulator.slowdown import predicted
from tests.support.simulated_jobs import Watched, ends_s, job


class Table:
    """A predictor that has been told all weights."""

    name = "table"

    def __init__(self, weights: dict[tuple[str, str], float]) -> None:
        self._weights = weights

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        found = self._weights.get((slot.online or "", job.kind))
        return None if found is None else Weight(found, 0.0, "given")


def beside(weights: dict[tuple[str, str], float], jobs: list[TraceJob]) -> tuple[Outcome, Watched]:
    """One GPU for each kind of service in `weights`."""
    services = sorted({service for service, _ in weights})
    slots = {one: Slot("node", one, "H200", one, 0.5, 0.01, 0.01, 2**30, None) for one in services}
    kinds = {kind: Job(kind, kind, 2**20, 0.001) for _, kind in weights}
    online = [job(one, math.inf, online=True, kind=one) for one in services]
    policy = Watched(Pairing())
    setting = Setting(len(services), predicted(Table(weights), slots, kinds))
    return simulate([*online, *jobs], policy, setting), policy


def test_the_pairs_are_those_with_the_largest_sum_not_the_best_for_the_first() -> None:
    weights = {("s", "a"): 0.9, ("s", "b"): 0.8, ("t", "a"): 0.8, ("t", "b"): 0.2}
    outcome, _ = beside(weights, [job("a", 8, 1, kind="a"), job("b", 8, 1, kind="b")])
    assert ends_s(outcome) == pytest.approx({"a": 1 + 8 / 0.8, "b": 1 + 8 / 0.8})


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(0.05, 1), min_size=3, max_size=3), min_size=3, max_size=3))
def test_the_first_plan_has_the_largest_sum_of_all_permutations(rows: list[list[float]]) -> None:
    weights = {(f"s{i}", f"k{j}"): value for i, row in enumerate(rows) for j, value in enumerate(row)}
    outcome, _ = beside(weights, [job(f"k{j}", 100, 1, kind=f"k{j}") for j in range(3)])
    assert all(one.queueing_s == pytest.approx(0, abs=1e-6) for one in outcome.ended)
    found = sum(100 / one.held_s for one in outcome.ended)
    best = max(sum(rows[i][column] for i, column in enumerate(order)) for order in permutations(range(3)))
    assert found == pytest.approx(best)


def test_a_pair_that_nothing_is_known_of_is_not_made() -> None:
    weights = {("s", "known"): 0.5, ("t", "known"): 0.5}
    outcome, policy = beside(weights, [job("known", 10, 1, kind="known"), job("again", 10, 1, kind="known")])
    assert ends_s(outcome) == pytest.approx({"known": 21, "again": 21})
    assert all(len(tenants) <= 2 for state in policy.states for tenants in state.tenants)


def test_one_offline_job_runs_beside_a_service_and_the_next_one_waits() -> None:
    outcome, _ = beside({("s", "k"): 0.5}, [job("first", 10, 1, kind="k"), job("next", 10, 2, kind="k")])
    assert ends_s(outcome) == pytest.approx({"first": 21, "next": 41})


def test_a_service_that_comes_later_shares_with_the_offline_job_on_the_only_gpu() -> None:
    slots = {"s": Slot("node", "s", "H200", "s", 0.5, 0.01, 0.01, 2**30, None)}
    slowdown = predicted(Table({("s", "k"): 0.5}), slots, {"k": Job("k", "k", 2**20, 0.001)})
    jobs = [job("offline", 10, kind="k"), job("service", 4, 2, kind="s", online=True)]
    assert ends_s(simulate(jobs, Pairing(), Setting(1, slowdown))) == pytest.approx({"service": 6, "offline": 12})


def test_a_gang_of_offline_jobs_takes_free_gpus_only() -> None:
    setting = Setting(2, lambda one, other: (1.0, 1.0))
    jobs = [job("service", 10, online=True), job("gang", 5, 1, gpus=2)]
    assert ends_s(simulate(jobs, Pairing(), setting)) == {"service": 10, "gang": 15}
