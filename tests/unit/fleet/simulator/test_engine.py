# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError, TraceJob
from fleet.policies import BUILTIN, Options, build
from fleet.simulator.cluster import Act, Cluster, Preempt, Share, Start, Wake
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.slowdown import constant
from tests.support.simulated_jobs import Scripted, Watched, ends_s, job, run, traces

policies = st.sampled_from(list(BUILTIN))
settings = st.builds(
    Setting,
    gpus=st.just(8),
    slowdown=st.sampled_from([1.0, 1.3, 2.5]).map(constant),
    gpus_per_node=st.sampled_from([None, 2, 4, 8]),
    interval_s=st.sampled_from([None, 7.0, 360.0]),
    restart_s=st.sampled_from([0.0, 30.0]),
)


class Fixed:
    """Answers with the same acts each time."""

    name = "fixed"

    def __init__(self, *acts: Act) -> None:
        self._acts = acts

    def step(self, state: Cluster, now_s: float) -> tuple[Act, ...]:
        return self._acts


@given(traces(), policies, settings)
def test_every_job_ends_and_none_before_its_work_is_done(jobs: list[TraceJob], name: str, setting: Setting) -> None:
    outcome = simulate(jobs, build(name, Options()), setting)
    assert sorted(one.job.key for one in outcome.ended) == sorted(one.key for one in jobs)
    assert all(one.jct_s >= (one.job.duration_s or 0) - 1e-6 for one in outcome.ended)
    assert all(one.start_s >= one.job.submit_s for one in outcome.ended)


@given(traces(), policies, settings)
def test_the_gpu_time_that_is_held_is_work_and_what_sharing_and_restarts_cost(
    jobs: list[TraceJob], name: str, setting: Setting
) -> None:
    outcome = simulate(jobs, build(name, Options()), setting)
    for one in outcome.ended:
        assert one.job.duration_s is not None
        assert one.held_s == pytest.approx(one.job.duration_s + one.slowed_s + one.restarted_s, rel=1e-9, abs=1e-5)
    held_gpu_s = math.fsum(one.held_s * one.size for one in outcome.ended)
    assert outcome.tenant_gpu_s == pytest.approx(held_gpu_s, rel=1e-9, abs=1e-5)
    assert outcome.busy_gpu_s <= outcome.tenant_gpu_s * (1 + 1e-9) <= 2 * outcome.busy_gpu_s * (1 + 1e-8) + 1e-9


@given(traces(), policies, settings)
def test_no_gpu_has_more_than_two_tenants_and_each_gang_has_all_its_gpus_on_as_few_nodes_as_can_hold_it(
    jobs: list[TraceJob], name: str, setting: Setting
) -> None:
    watched = Watched(build(name, Options()))
    simulate(jobs, watched, setting)
    for state in watched.states:
        assert len(state.tenants) == setting.gpus
        assert all(len(tenants) <= 2 for tenants in state.tenants)
        for number, active in state.running.items():
            assert len(active.gpus) == active.size
            assert [gpu for gpu, tenants in enumerate(state.tenants) if number in tenants] == list(active.gpus)
            nodes = {gpu // state.gpus_per_node for gpu in active.gpus}
            assert len(nodes) == math.ceil(active.size / state.gpus_per_node)


def test_two_jobs_that_share_a_gpu_run_at_the_given_speed_until_one_ends() -> None:
    outcome = run(Scripted({"a": (0, (0,)), "b": (0, (0,))}), [job("a", 100), job("b", 60)], factor=1.5)
    assert ends_s(outcome) == pytest.approx({"b": 90, "a": 130})


def test_a_gang_that_shares_one_of_its_gpus_is_slowed_on_all_of_them() -> None:
    script = Scripted({"gang": (0, (0, 1)), "single": (0, (1,))})
    outcome = run(script, [job("gang", 100, gpus=2), job("single", 40)], gpus=2, factor=2.0)
    assert ends_s(outcome) == pytest.approx({"single": 80, "gang": 140})


def test_a_gang_beside_two_others_runs_at_the_pace_beside_the_worse_one() -> None:
    def slowdown(one: TraceJob, other: TraceJob) -> tuple[float, float]:
        factor = 3.0 if "bad" in (one.key, other.key) else 1.5
        return factor, factor

    script = Scripted({"gang": (0, (0, 1)), "mild": (0, (0,)), "bad": (0, (1,))})
    jobs = [job("gang", 100, gpus=2), job("mild", 1000), job("bad", 1000)]
    outcome = simulate(jobs, script, Setting(2, slowdown))
    assert ends_s(outcome)["gang"] == pytest.approx(300)


def test_a_preempted_job_pays_for_its_restart_and_keeps_its_progress() -> None:
    outcome = run(build("srtf", Options()), [job("long", 100), job("short", 10, submit_s=20)], restart_s=5)
    assert ends_s(outcome) == pytest.approx({"short": 30, "long": 115})
    assert {one.job.key: one.preemptions for one in outcome.ended} == {"long": 1, "short": 0}
    assert {one.job.key: one.queueing_s for one in outcome.ended} == pytest.approx({"long": 10, "short": 0})


def test_with_an_interval_decisions_are_made_at_its_multiples() -> None:
    setting = Setting(1, constant(1.5), interval_s=60)
    outcome = simulate([job("a", 30, submit_s=10), job("b", 30, submit_s=60)], build("fifo", Options()), setting)
    assert {one.job.key: one.start_s for one in outcome.ended} == {"a": 60, "b": 120}


def test_a_service_takes_part_but_has_no_figures() -> None:
    service = job("service", math.inf, online=True)
    outcome = run(build("ffs", Options()), [service, job("offline", 10)], factor=2.0)
    assert ends_s(outcome) == pytest.approx({"offline": 20})


def test_a_job_that_may_share_with_no_service_is_counted_when_nothing_else_is_to_come() -> None:
    setting = Setting(1, lambda one, other: (1.0, 1.0) if "friend" in (one.key, other.key) else None)
    jobs = [job("service", math.inf, online=True), job("friend", 10, 1), job("stranger", 10, 2)]
    for name in ("ffs", "pairing", "fifo"):
        outcome = simulate(jobs, build(name, Options()), setting)
        stuck = 2 if name == "fifo" else 1
        assert outcome.dropped == {"found no GPU that it may use": stuck}
        assert len(outcome.ended) == 2 - stuck


def test_jobs_that_cannot_be_simulated_are_counted() -> None:
    jobs = [job("huge", 5, gpus=3), TraceJob("unknown", 0, 1, None), job("part", 5, gpus=0.3)]
    outcome = run(build("fifo", Options()), jobs, gpus=2)
    assert outcome.dropped == {"asks for more than 2 GPUs": 1, "duration unknown": 1}
    assert [one.size for one in outcome.ended] == [1]


def test_progress_ends_with_all_jobs() -> None:
    seen: list[tuple[int, int]] = []
    simulate(
        [job("a", 5), job("b", 5)], build("fifo", Options()), Setting(1, constant(1)), lambda *now: seen.append(now)
    )
    assert seen[-1] == (2, 2)


@pytest.mark.parametrize(
    ("acts", "reason"),
    [
        ((), "waiting on an idle cluster"),
        ((Start(0, (0, 1)),), "needs 1 GPUs"),
        ((Start(0, (7,)),), "needs 1 GPUs"),
        ((Start(5, (0,)),), "does not wait"),
        ((Preempt(0),), "does not run"),
        ((Start(0, (0,)), Start(1, (0,))), "too many tenants"),
        ((Start(0, (0,)), Share(1, (0,)), Share(2, (0,))), "too many tenants"),
        ((Wake(0.0),), "past"),
    ],
)
def test_an_act_that_is_impossible_names_the_policy(acts: tuple[Act, ...], reason: str) -> None:
    with pytest.raises(FleetError, match=f"policy fixed .*{reason}"):
        run(Fixed(*acts), [job("a", 5), job("b", 5), job("c", 5)], gpus=2)


def test_jobs_that_are_no_pair_are_not_put_together() -> None:
    setting = Setting(1, lambda one, other: None)
    with pytest.raises(FleetError, match="no pair"):
        simulate([job("a", 5), job("b", 5)], Fixed(Start(0, (0,)), Share(1, (0,))), setting)


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus_per_node": 3}, {"interval_s": 0.0}, {"restart_s": -1.0}])
def test_an_impossible_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FleetError, match=r"has to be|give whole nodes"):
        Setting(**{"gpus": 8, "slowdown": constant(1), **wrong})  # type: ignore[arg-type]


def test_jobs_share_only_where_both_fit_into_the_memory_as_far_as_it_is_known() -> None:
    setting = Setting(1, constant(1.1), memory_bytes=10)
    small, large, unknown = job("small", 9, memory_bytes=4), job("large", 9, memory_bytes=7), job("unknown", 9)
    for other, together in ((large, False), (unknown, True), (small, True)):
        outcome = simulate([small, other], build("ffs", Options()), setting)
        assert (max(one.queueing_s for one in outcome.ended) == 0) is together
