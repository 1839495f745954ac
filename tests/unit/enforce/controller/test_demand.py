# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a launch takes by the picture of its container, and what of a wait is a process's own work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ContainerUsage, DeviceUuid, FunctionUsage, ProcessId, Snapshot
from enforce.controller import inputs
from enforce.controller.inputs import Counters, Demand
from tests.support.snapshots import GPU_0, container, rich_snapshot

PROCESSES = (ProcessId(10, 1), ProcessId(11, 1))


def function(rate: float, seconds: float | None, *, nodes: int = 1) -> FunctionUsage:
    return FunctionUsage("gemm", GPU_0, rate, 0.1, seconds, nodes > 1, nodes)


def of(*functions: FunctionUsage) -> Snapshot:
    row = ContainerUsage(container("a1", "training"), (), PROCESSES, functions)
    return replace(rich_snapshot(), containers=(row,))


def test_each_process_of_a_container_has_the_mean_of_its_functions_by_how_often_they_are_launched() -> None:
    found = inputs.launch_ns(of(function(300.0, 1e-4), function(100.0, 5e-4), function(0.0, None)))
    assert found == {process: pytest.approx(200_000) for process in PROCESSES}


def test_a_graph_counts_as_one_launch_whatever_is_in_it() -> None:
    found = inputs.launch_ns(of(function(300.0, 1e-4), function(800.0, 5e-4, nodes=8)))
    assert found == {process: pytest.approx(200_000) for process in PROCESSES}


@pytest.mark.parametrize(
    "functions",
    [
        (),
        (function(0.0, 1e-4),),
        (function(300.0, 1e-4), function(100.0, None)),
        (function(300.0, 0.0),),
    ],
    ids=["nothing", "launched nothing", "one is unknown", "nothing yet by NVML"],
)
def test_without_a_known_duration_there_is_no_estimate(functions: tuple[FunctionUsage, ...]) -> None:
    assert inputs.launch_ns(of(*functions)) == {}


A, B, C = ProcessId(20, 1), ProcessId(21, 1), ProcessId(22, 1)
GPU_1 = DeviceUuid("GPU-1")
HERE, ELSEWHERE = frozenset({GPU_0}), frozenset({GPU_1})
SECOND_NS = 1_000_000_000


def charged(**charges: int) -> Demand:
    """After a second in which processes were charged so much each."""
    by_name = {"a": A, "b": B, "c": C}
    demand = Demand()
    demand.observe(0, {by_name[name]: Counters(0, 0) for name in charges})
    demand.observe(SECOND_NS, {by_name[name]: Counters(ns, 0) for name, ns in charges.items()})
    return demand


def test_a_process_alone_on_its_device_waits_for_itself() -> None:
    assert charged(a=100, b=100).own_ratios({A: HERE, B: ELSEWHERE}) == {}


def test_of_two_that_launch_alike_each_waits_for_the_other_half_of_the_time() -> None:
    assert charged(a=100, b=100).own_ratios({A: HERE, B: HERE}) == {A: 0.5, B: 0.5}


def test_one_that_launches_little_is_waited_for_little_and_waits_for_a_turn_of_each_other_one() -> None:
    ratios = charged(a=100, b=25, c=100).own_ratios({A: HERE, B: HERE, C: HERE})
    assert ratios == pytest.approx({A: 1 / 2.25, B: 1 / 3, C: 1 / 2.25})


def test_a_process_that_launched_nothing_waits_for_nobody_and_nobody_for_it() -> None:
    assert charged(a=100, b=0).own_ratios({A: HERE, B: HERE}) == {A: 1.0}


def test_on_several_devices_the_most_crowded_one_counts() -> None:
    both = charged(a=100, b=100, c=100).own_ratios({A: HERE | ELSEWHERE, B: HERE, C: HERE})
    assert both[A] == pytest.approx(1 / 3)


@given(st.lists(st.integers(0, 10**12), min_size=3, max_size=3))
def test_own_work_is_at_least_one_turn_in_as_many_as_there_are_processes(charges: list[int]) -> None:
    ratios = charged(**dict(zip("abc", charges, strict=True))).own_ratios({A: HERE, B: HERE, C: HERE})
    assert all(1 / 3 <= ratio <= 1 for ratio in ratios.values())
    assert ratios.keys() == {one for one, ns in zip((A, B, C), charges, strict=True) if ns}
