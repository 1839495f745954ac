# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Scenarios for attribution: any seed gives a plausible one, the same seed the same one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.attribution.scenarios import KINDS, Scenario, Tenant, scenario
from bench.attribution.scenarios_load import LONGEST_US, MOST_LAUNCHES_PER_SECOND

SEEDS = st.integers(0, 2**64)
ANY = st.builds(scenario, st.sampled_from(list(KINDS)), SEEDS)


def option(tenant: Tenant, name: str, default: str = "0") -> str:
    return tenant.arguments[tenant.arguments.index(name) + 1] if name in tenant.arguments else default


def launches_per_second(tenant: Tenant) -> float:
    """What it asks for when no other process is in its way."""
    launches = int(option(tenant, "--kernels"))
    if tenant.program == "online":
        return float(option(tenant, "--rate")) * (1 if "--graph" in tenant.arguments else launches)
    waves = 1  # the fewest: so this is the most
    step_us = launches * float(option(tenant, "--kernel-us")) * waves * max(1, int(option(tenant, "--graph")))
    return launches / (step_us + float(option(tenant, "--host-us"))) * 1e6


@given(ANY)
def test_the_same_seed_gives_the_same_scenario(one: Scenario) -> None:
    assert scenario(one.kind, one.seed) == one


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_another_scenario(kind: str) -> None:
    assert scenario(kind, 1).tenants != scenario(kind, 2).tenants


@given(ANY)
def test_every_tenant_has_a_name_of_its_own_and_something_to_do(one: Scenario) -> None:
    assert len({tenant.name for tenant in one.tenants}) == len(one.tenants) >= 2
    for tenant in one.tenants:
        assert int(option(tenant, "--kernels")) >= 1
        assert 1 <= int(option(tenant, "--blocks")) <= 132 * 8 * 4
        assert 1 <= float(option(tenant, "--kernel-us")) <= LONGEST_US
        assert float(option(tenant, "--host-us")) >= 0


@given(ANY)
def test_two_cores_can_simulate_it(one: Scenario) -> None:
    together = sum(launches_per_second(tenant) for tenant in one.tenants)
    assert together <= 4 * MOST_LAUNCHES_PER_SECOND  # kernels of several waves last longer than the bound assumes


@given(SEEDS, st.sampled_from([2, 4, 8]))
def test_under_mps_every_tenant_has_a_percentage(seed: int, count: int) -> None:
    one = scenario(f"mps-{count}", seed)
    assert one.mps
    assert len(one.tenants) == count
    assert all(tenant.percentage and 1 <= tenant.percentage <= 100 for tenant in one.tenants)


@given(SEEDS)
def test_drift_is_by_a_factor_within_reason(seed: int) -> None:
    one = scenario("drift", seed)
    factors = [float(option(tenant, "--drift", "1")) for tenant in one.tenants]
    assert all(0.3 <= factor <= 3 for factor in factors)
    assert sum(factor != 1 for factor in factors) == 2


@given(SEEDS)
def test_two_gpus_has_a_process_on_both_and_others_on_each(seed: int) -> None:
    one = scenario("two-gpus", seed)
    assert one.gpus == 2
    assert {*option(one.tenants[0], "--devices").split(",")} == {"0", "1"}
    assert [tenant.visible for tenant in one.tenants[1:]] == ["1", None]


@given(SEEDS)
def test_short_jobs_last_300_ms_and_come_one_after_another(seed: int) -> None:
    jobs = [tenant for tenant in scenario("short-jobs", seed).tenants if tenant.jobs]
    assert len(jobs) == 2
    assert all(option(tenant, "--seconds") == "0.3" for tenant in jobs)


@given(SEEDS)
def test_a_divided_gpu_has_two_on_one_instance_one_on_the_other_and_another_gpu_is_whole(seed: int) -> None:
    one = scenario("mig", seed)
    assert (one.gpus, one.mps) == (2, False)
    assert [(tenant.instance, tenant.visible) for tenant in one.tenants] == [
        (1, None),
        (1, None),
        (2, None),
        (None, "1"),
    ]


@given(SEEDS)
def test_kernels_of_unlike_length_differ_by_more_than_ten_times(seed: int) -> None:
    short, long, _ = scenario("mixed-lengths", seed).tenants
    waves = 4  # at most: --kernel-us is of one
    assert float(option(short, "--kernel-us")) <= 60
    assert float(option(long, "--kernel-us")) * waves >= 2000


@given(SEEDS)
def test_a_program_with_the_driver_in_it_works_beside_two_that_are_seen(seed: int) -> None:
    assert [tenant.program for tenant in scenario("unseen", seed).tenants] == ["offline-static", "offline", "online"]


@given(SEEDS)
def test_graphs_and_contexts_are_older_than_the_agent_or_than_the_second_one(seed: int) -> None:
    for kind, older, restarted in (("older", True, False), ("restarted", False, True)):
        one = scenario(kind, seed)
        assert (one.older, one.restarted, one.gpus) == (older, restarted, 2)
        assert sum("--graph" in tenant.arguments for tenant in one.tenants) == 2
