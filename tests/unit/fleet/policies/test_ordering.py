# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policies that do not share, and the policy that always does."""

from __future__ import annotations

from hypothesis import given

from fleet.model import TraceJob
from fleet.policies.ffs import Ffs
from fleet.policies.fifo import Fifo
from fleet.policies.sjf import Sjf
from fleet.policies.srtf import Srtf
from tests.support.simulated_jobs import ends_s, job, mean_jct_s, run, traces


def test_fifo_lets_nothing_pass_a_job_that_does_not_fit() -> None:
    jobs = [job("runs", 10), job("gang", 5, submit_s=1, gpus=2), job("small", 1, submit_s=2)]
    assert ends_s(run(Fifo(), jobs, gpus=2)) == {"runs": 10, "gang": 15, "small": 16}


def test_fifo_takes_services_first() -> None:
    jobs = [job("runs", 10), job("offline", 5, submit_s=1), job("service", 5, submit_s=2, online=True)]
    assert ends_s(run(Fifo(), jobs)) == {"runs": 10, "service": 15, "offline": 20}


def test_sjf_takes_the_shortest_and_lets_others_pass_one_that_does_not_fit() -> None:
    jobs = [
        job("runs", 10),
        job("gang", 2, submit_s=1, gpus=2),
        job("long", 8, submit_s=2),
        job("short", 3, submit_s=2),
    ]
    assert ends_s(run(Sjf(), jobs, gpus=2)) == {"short": 5, "runs": 10, "long": 13, "gang": 15}


def test_sjf_does_not_preempt() -> None:
    assert ends_s(run(Sjf(), [job("long", 10), job("short", 1, submit_s=1)])) == {"long": 10, "short": 11}


def test_srtf_preempts_for_a_job_that_ends_sooner() -> None:
    assert ends_s(run(Srtf(), [job("long", 10), job("short", 1, submit_s=1)])) == {"short": 2, "long": 11}


def test_of_two_with_the_same_remaining_time_the_one_that_runs_goes_on() -> None:
    outcome = run(Srtf(), [job("first", 10), job("second", 5, submit_s=5)], restart_s=3)
    assert ends_s(outcome) == {"first": 10, "second": 15}


def test_srsf_weighs_a_gang_by_its_gpus() -> None:
    jobs = [job("gang", 6, gpus=2), job("one", 10), job("other", 10)]
    assert ends_s(run(Srtf(), jobs, gpus=2)) == {"gang": 6, "one": 16, "other": 16}
    assert ends_s(run(Srtf(by_gpus=True), jobs, gpus=2)) == {"one": 10, "other": 10, "gang": 16}


@given(traces(most_gpus=1))
def test_on_one_gpu_srtf_is_at_least_as_good_as_fifo_and_sjf(jobs: list[TraceJob]) -> None:
    srtf_s = mean_jct_s(run(Srtf(), jobs))
    assert srtf_s <= mean_jct_s(run(Fifo(), jobs)) + 1e-6
    assert srtf_s <= mean_jct_s(run(Sjf(), jobs)) + 1e-6


@given(traces(most_gpus=1, at_once=True))
def test_sharing_without_slowdown_is_as_good_as_twice_the_gpus_and_never_worse_than_not_sharing(
    jobs: list[TraceJob],
) -> None:
    """Shortest first is optimal on identical machines when all jobs are there (Conway et al. 1967)."""
    shared_s = mean_jct_s(run(Ffs(), jobs, gpus=2, factor=1.0))
    assert abs(shared_s - mean_jct_s(run(Sjf(), jobs, gpus=4))) <= 1e-6 * max(1.0, shared_s)
    assert shared_s <= mean_jct_s(run(Sjf(), jobs, gpus=2)) + 1e-6


def test_ffs_takes_the_lowest_gpu_with_one_tenant_whoever_that_is() -> None:
    jobs = [job("short", 100), job("long", 1000), job("new", 10, submit_s=1)]
    assert ends_s(run(Ffs(), jobs, gpus=2, factor=2.0)) == {"new": 21, "short": 110, "long": 1000}
