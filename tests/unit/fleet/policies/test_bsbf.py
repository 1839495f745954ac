# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fleet.policies.bsbf import Bsbf, sequential_mean_s, shared_mean_s
from fleet.policies.ffs import Ffs
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import Outcome
from fleet.simulator.slowdown import constant
from tests.support.simulated_jobs import Scripted, ends_s, job, mean_jct_s, run

lengths_s = st.floats(1, 10_000)
factors = st.tuples(st.floats(1, 4), st.floats(1, 4))


def together(alone_s: tuple[float, float], slowed: tuple[float, float], start_s: float) -> Outcome:
    """B runs from 0 on, A joins it."""

    def slowdown(one: object, other: object) -> tuple[float, float]:
        return slowed if getattr(one, "key", None) == "a" else (slowed[1], slowed[0])

    jobs = [job("a", alone_s[0]), job("b", alone_s[1])]
    return simulate(jobs, Scripted({"a": (start_s, (0,)), "b": (0, (0,))}), Setting(1, slowdown))


@given(st.tuples(lengths_s, lengths_s), factors)
def test_the_formula_of_sharing_is_the_mean_of_a_run_step_by_step(
    alone_s: tuple[float, float], slowed: tuple[float, float]
) -> None:
    assert shared_mean_s(alone_s, slowed) == pytest.approx(mean_jct_s(together(alone_s, slowed, 0.0)), rel=1e-9)


@given(st.tuples(lengths_s, lengths_s), factors)
def test_the_formula_of_waiting_is_the_mean_of_a_run_step_by_step(
    alone_s: tuple[float, float], slowed: tuple[float, float]
) -> None:
    assert sequential_mean_s(alone_s) == pytest.approx(mean_jct_s(together(alone_s, slowed, alone_s[1])), rel=1e-9)


@given(st.tuples(lengths_s, lengths_s), factors, st.floats(0, 1))
def test_a_pair_is_best_at_either_end_of_the_time_in_which_it_can_start(
    alone_s: tuple[float, float], slowed: tuple[float, float], part: float
) -> None:
    between_s = mean_jct_s(together(alone_s, slowed, part * alone_s[1]))
    assert between_s >= min(shared_mean_s(alone_s, slowed), sequential_mean_s(alone_s)) * (1 - 1e-9)


@given(st.tuples(lengths_s, lengths_s), st.floats(1, 4))
def test_a_job_that_comes_to_one_that_runs_does_what_is_better_for_both(
    alone_s: tuple[float, float], factor: float
) -> None:
    best_s = min(shared_mean_s(alone_s, (factor, factor)), sequential_mean_s(alone_s))
    assume(alone_s[0] >= alone_s[1])  # the shorter one is started first, and the other comes to it
    outcome = run(Bsbf(), [job("a", alone_s[0]), job("b", alone_s[1])], factor=factor)
    assert mean_jct_s(outcome) == pytest.approx(best_s, rel=1e-9)


def test_free_gpus_come_before_partners() -> None:
    outcome = run(Bsbf(), [job("a", 10), job("b", 10)], gpus=2, factor=1.01)
    assert ends_s(outcome) == {"a": 10, "b": 10}


def test_of_several_partners_it_is_the_one_with_the_least_mean_completion_time() -> None:
    jobs = [job("long", 1000), job("short", 100), job("new", 90, submit_s=10)]
    outcome = run(Bsbf(), jobs, gpus=2, factor=1.2)
    assert ends_s(outcome)["short"] > 100  # its remaining 90 s make less than the 990 s of the other
    assert ends_s(outcome)["long"] == 1000


def test_where_sharing_costs_too_much_the_job_waits_and_ffs_shares_all_the_same() -> None:
    jobs = [job("a", 100), job("b", 100)]
    assert ends_s(run(Bsbf(), jobs, factor=2.5)) == {"a": 100, "b": 200}
    assert ends_s(run(Ffs(), jobs, factor=2.5)) == {"a": 250, "b": 250}


def test_a_job_that_must_wait_lets_the_next_one_try() -> None:
    jobs = [job("runs", 100), job("gang", 20, submit_s=1, gpus=2), job("small", 50, submit_s=1)]
    outcome = run(Bsbf(), jobs, gpus=2, factor=8.0)
    assert ends_s(outcome)["small"] == 51


def test_a_gang_takes_what_is_free_and_shares_the_rest() -> None:
    setting = Setting(3, constant(1.2))
    outcome = simulate([job("single", 100), job("gang", 100, submit_s=1, gpus=3)], Bsbf(), setting)
    assert {one.job.key: one.queueing_s for one in outcome.ended} == pytest.approx({"single": 0, "gang": 0})
