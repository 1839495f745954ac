# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The plan is feasible, certified, the same each time, and never worse than what it is held against but for a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fleet.match.plan import Plan, Settings, solve
from fleet.match.types import Granularity
from fleet.model import Job, Predictor, Slot, throughput_rows
from fleet.weights.physical import Physical
from fleet.weights.table import Measured, Pair, Table

GIB = 1 << 30
ONLINE, OFFLINE, MODELS = ["bert", "t5", "vit"], ["etl", "train", "render"], ["H100", "A100"]


@st.composite
def slots(draw: st.DrawFn) -> list[Slot]:
    figures = st.tuples(
        st.sampled_from([*ONLINE, None]),
        st.floats(0.0, 1.0),
        st.floats(1e-4, 0.1),
        st.floats(0.0, 0.02),
        st.integers(1, 80),
        st.sampled_from(MODELS),
    )
    found = draw(st.lists(figures, max_size=25))
    return [
        Slot(f"node-{at // 4}", f"GPU-{at}", model, online, load, gap_s, slack_s, gib * GIB, None)
        for at, (online, load, gap_s, slack_s, gib, model) in enumerate(found)
    ]


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    figures = st.tuples(
        st.sampled_from(OFFLINE),
        st.integers(0, 60 * GIB),
        st.one_of(st.none(), st.floats(1e-5, 0.02)),
        st.sampled_from([1.0, 3.0]),
    )
    found = draw(st.lists(figures, max_size=25))
    return [Job(f"job-{at}", kind, memory, kernel, value) for at, (kind, memory, kernel, value) in enumerate(found)]


@st.composite
def predictors(draw: st.DrawFn) -> Predictor:
    """The prior, or a table of some measured pairs over it."""
    pairs = st.builds(Pair, st.sampled_from(ONLINE), st.sampled_from(OFFLINE), st.sampled_from(MODELS))
    measured = st.builds(Measured, st.floats(0.0, 1.0), st.integers(1, 9), st.one_of(st.none(), st.floats(0.01, 1.0)))
    return Table(draw(st.dictionaries(pairs, measured, max_size=12)))


def optimum(slots: list[Slot], jobs: list[Job], predictor: Predictor) -> float:
    """Of the dense problem, without types."""
    if not slots or not jobs:
        return 0.0
    worth: Any = np.array(list(throughput_rows(predictor, slots, jobs)), dtype=float)
    worth = np.nan_to_num(worth, nan=0.0) * np.array([job.value for job in jobs])
    return float(worth[linear_sum_assignment(worth, maximize=True)].sum())


@given(slots(), jobs(), predictors())
@settings(max_examples=40)
def test_the_bound_is_never_below_the_optimum(slots: list[Slot], jobs: list[Job], predictor: Predictor) -> None:
    plan, best = solve(slots, jobs, predictor), optimum(slots, jobs, predictor)
    assert plan.value <= best + 1e-6
    assert plan.bound >= best - 1e-6


@given(slots(), jobs(), predictors())
@settings(max_examples=40)
def test_each_pair_can_run_and_no_slot_or_job_is_in_two(
    slots: list[Slot], jobs: list[Job], predictor: Predictor
) -> None:
    plan = solve(slots, jobs, predictor)
    assert len({one.slot.gpu for one in plan.placed}) == len(plan.placed)
    assert len({one.job.key for one in plan.placed}) == len(plan.placed)
    assert len(plan.placed) == sum(plan.amounts.values())
    for one in plan.placed:
        assert predictor.weight(one.slot, one.job) == one.weight
        assert one.job.memory_bytes <= one.slot.free_bytes


@given(slots(), jobs(), predictors())
@settings(max_examples=20)
def test_no_baseline_is_worth_more_than_the_optimum(slots: list[Slot], jobs: list[Job], predictor: Predictor) -> None:
    plan, best = solve(slots, jobs, predictor), optimum(slots, jobs, predictor)
    assert set(plan.baselines) == {"random", "first_fit", "greedy"}
    assert all(value <= best + 1e-6 for value in plan.baselines.values())


@given(slots(), jobs(), predictors())
@settings(max_examples=10)
def test_the_same_input_gives_the_same_plan(slots: list[Slot], jobs: list[Job], predictor: Predictor) -> None:
    assert solve(slots, jobs, predictor) == solve(slots, jobs, predictor)


def crowded(count: int = 40) -> tuple[list[Slot], list[Job]]:
    """Loads and gaps all differ, so that types cost something."""
    slots = [
        Slot("node", f"GPU-{at}", "H100", "bert", 0.02 * at + 0.01, 0.02 / (1 + at % 7), 0.05, 80 * GIB, None)
        for at in range(count)
    ]
    return slots, [Job(f"job-{at}", OFFLINE[at % 3], GIB, (1e-4, 4e-3, 2e-2)[at % 3]) for at in range(count)]


def test_steps_are_halved_until_the_gap_is_small_enough() -> None:
    slots, jobs = crowded()
    coarse = Settings(Granularity(weight=0.8, alike=0.16), most_gap=1.0)
    fine = replace(coarse, most_gap=1e-3)
    before, after = solve(slots, jobs, Physical(), coarse), solve(slots, jobs, Physical(), fine)
    assert before.gap_ratio > 1e-3 >= after.gap_ratio
    assert after.granularity.weight < before.granularity.weight
    assert after.bound >= optimum(slots, jobs, Physical()) - 1e-9


def test_where_types_would_be_too_many_coarser_ones_are_taken_and_certified() -> None:
    slots, jobs = crowded()
    plan = solve(slots, jobs, Physical(), Settings(most_type_pairs=30))
    assert len(plan.slot_types) * len(plan.job_types) <= 30
    assert plan.value <= optimum(slots, jobs, Physical()) <= plan.bound + 1e-9


def exact_table() -> tuple[list[Slot], list[Job], Table]:
    """Two services and two programs that are each good beside one of them."""
    slots = [
        Slot("node", f"GPU-{at}", "H100", ("bert", "t5")[at % 2], 0.5, 0.01, 0.05, 80 * GIB, None) for at in range(4)
    ]
    jobs = [Job(f"job-{at}", ("etl", "train")[at // 2], GIB, 1e-3) for at in range(4)]
    weights = {("bert", "etl"): 0.8, ("t5", "etl"): 0.7, ("bert", "train"): 0.6, ("t5", "train"): 0.1}
    pairs = {Pair(online, job, "H100"): Measured(value, 10**9) for (online, job), value in weights.items()}
    return slots, jobs, Table(pairs)


def test_a_greedy_order_that_spoils_the_total_is_beaten() -> None:
    slots, jobs, table = exact_table()
    plan = solve(slots, jobs, table)
    assert plan.value == pytest.approx(2 * 0.7 + 2 * 0.6, abs=1e-6)
    assert plan.baselines["greedy"] == pytest.approx(2 * 0.8 + 2 * 0.1, abs=1e-6)
    assert plan.gain("greedy") == pytest.approx(2.6 / 1.8, abs=1e-6)
    assert not plan.any_order_is_as_good


def test_weights_that_only_add_up_make_any_order_as_good() -> None:
    slots, jobs, _ = exact_table()
    added = {("bert", "etl"): 0.8, ("t5", "etl"): 0.7, ("bert", "train"): 0.6, ("t5", "train"): 0.5}
    pairs = {Pair(online, job, "H100"): Measured(value, 10**9) for (online, job), value in added.items()}
    assert solve(slots, jobs, Table(pairs)).any_order_is_as_good


def test_a_gpu_that_two_slots_have_is_given_to_nobody() -> None:
    slots, jobs, table = exact_table()
    plan = solve([*slots, replace(slots[0], node="other")], jobs, table)
    assert plan.left_out == {"two slots with one GPU": 2}
    assert "GPU-0" not in {one.slot.gpu for one in plan.placed}


def test_jobs_that_are_listed_twice_or_are_worth_nothing_are_counted_and_left_out() -> None:
    slots, jobs, table = exact_table()
    plan = solve(slots, [*jobs, jobs[0], replace(jobs[0], key="x", value=float("nan"))], table)
    assert sum(plan.left_out.values()) == 2
    assert len(plan.placed) == 4


@pytest.mark.parametrize(("some_slots", "some_jobs"), [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_match_is_a_plan_without_pairs(some_slots: int, some_jobs: int) -> None:
    slots, jobs, table = exact_table()
    plan: Plan = solve(slots[:some_slots], jobs[:some_jobs], table)
    assert (plan.placed, plan.value, plan.gap_ratio, plan.gain("greedy")) == ((), 0, 0.0, None)


def test_expected_throughput_has_an_error_that_adds_up() -> None:
    slots, jobs, _ = exact_table()
    plan = solve(slots, jobs, Physical())
    assert plan.throughput == pytest.approx(sum(one.weight.throughput for one in plan.placed))
    assert plan.error == pytest.approx(4 * 0.05)
