# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import pytest

from fleet.model import FleetError
from fleet.policies.tiresias import Tiresias
from tests.support.simulated_jobs import ends_s, job, run


def test_a_job_below_the_threshold_preempts_one_above_it() -> None:
    outcome = run(Tiresias([50]), [job("old", 100), job("new", 20, submit_s=70)])
    assert ends_s(outcome) == pytest.approx({"new": 90, "old": 120})


def test_a_job_below_the_threshold_does_not_preempt_another_one() -> None:
    outcome = run(Tiresias([50]), [job("old", 40), job("new", 20, submit_s=10)])
    assert ends_s(outcome) == pytest.approx({"old": 40, "new": 60})


def test_a_job_that_passes_the_threshold_makes_room_at_once() -> None:
    outcome = run(Tiresias([50]), [job("old", 100), job("new", 20, submit_s=10)])
    assert ends_s(outcome) == pytest.approx({"new": 70, "old": 120}, abs=1e-3)


def test_attained_service_is_gpu_time() -> None:
    outcome = run(Tiresias([50]), [job("gang", 100, gpus=2), job("new", 20, submit_s=10)], gpus=2)
    assert ends_s(outcome) == pytest.approx({"new": 45, "gang": 120}, abs=1e-3)


def test_in_the_lowest_queue_who_runs_goes_on_and_who_was_preempted_comes_next() -> None:
    jobs = [job("first", 100), job("second", 100, submit_s=1), job("small", 5, submit_s=150)]
    outcome = run(Tiresias([10]), jobs)
    # second has its 10 s after first's, and goes behind it; small preempts second, which runs again after it
    assert ends_s(outcome) == pytest.approx({"first": 110, "small": 155, "second": 205}, abs=1e-3)


def test_a_job_that_comes_down_goes_behind_those_that_wait_there() -> None:
    jobs = [job("first", 30), job("second", 30, submit_s=1), job("third", 30, submit_s=2)]
    assert ends_s(run(Tiresias([10]), jobs)) == pytest.approx({"first": 50, "second": 70, "third": 90}, abs=1e-3)


def test_a_gang_that_waits_does_not_preempt_who_passed_it_in_its_own_queue() -> None:
    jobs = [job("long", 100), job("gang", 5, submit_s=1, gpus=2), job("passed", 100, submit_s=2)]
    outcome = run(Tiresias([10]), jobs, gpus=2)
    # at 10 s long comes down, but passed runs on until it comes down too, at 12 s
    assert ends_s(outcome)["gang"] == pytest.approx(17, abs=1e-3)


def test_three_queues_have_two_thresholds() -> None:
    jobs = [job("first", 30), job("second", 30, submit_s=1)]
    # 10 s each, then 10 s each, then 10 s each
    assert ends_s(run(Tiresias([10, 20]), jobs)) == pytest.approx({"first": 50, "second": 60}, abs=1e-3)


@pytest.mark.parametrize("wrong", [[], [0.0], [-5.0], [20.0, 10.0], [10.0, 10.0]])
def test_thresholds_that_do_not_ascend_are_refused(wrong: list[float]) -> None:
    with pytest.raises(FleetError, match="ascend"):
        Tiresias(wrong)
