# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a launch takes by the picture of its container."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.core.model import ContainerUsage, FunctionUsage, ProcessId, Snapshot
from enforce.controller import inputs
from tests.support.snapshots import GPU_0, container, rich_snapshot

PROCESSES = (ProcessId(10, 1), ProcessId(11, 1))


def function(rate: float, seconds: float | None, *, graph: bool = False) -> FunctionUsage:
    return FunctionUsage("gemm", GPU_0, rate, 0.1, seconds, graph)


def of(*functions: FunctionUsage) -> Snapshot:
    row = ContainerUsage(container("a1", "training"), (), PROCESSES, functions)
    return replace(rich_snapshot(), containers=(row,))


def test_each_process_of_a_container_has_the_mean_of_its_functions_by_how_often_they_are_launched() -> None:
    found = inputs.launch_ns(of(function(300.0, 1e-4), function(100.0, 5e-4), function(0.0, None)))
    assert found == {process: pytest.approx(200_000) for process in PROCESSES}


@pytest.mark.parametrize(
    "functions",
    [
        (),
        (function(0.0, 1e-4),),
        (function(300.0, 1e-4), function(100.0, None)),
        (function(300.0, 1e-4), function(100.0, 5e-4, graph=True)),
        (function(300.0, 0.0),),
    ],
    ids=["nothing", "launched nothing", "one is unknown", "one is a graph", "nothing yet by NVML"],
)
def test_without_a_known_duration_there_is_no_estimate(functions: tuple[FunctionUsage, ...]) -> None:
    assert inputs.launch_ns(of(*functions)) == {}
