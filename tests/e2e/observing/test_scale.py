# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The bench of the same name, ten times smaller: nothing is lost, nothing is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.latency.scale import bounded, loads, lost_in_kernel, run
from bench.latency.scale_stage import Load, Stage, open_stage
from tests.e2e.kernel_maps import map_of
from tools.harness.wait import until

SCALE = 10
MAPS = ("launches", "other_launches", "memory", "allocations", "copies", "delivered", "latencies")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A node of its own, whose agent watches no other."""
    with open_stage(tmp_path_factory.mktemp("scale")) as stage:
        yield stage


def entries(agent: int, name: str) -> int:
    """How many a map of the agent has now."""
    with map_of(agent, name) as found:
        return sum(1 for _ in found.items())


@pytest.mark.parametrize("load", loads(SCALE), ids=lambda load: load.name)
def test_every_launch_of_a_crowd_is_counted_and_nothing_of_it_stays(crowded: Stage, load: Load) -> None:
    counted, unplaced, peak = run(crowded, load, seconds=1.0)
    assert counted + unplaced == load.kernels
    assert not (load.hold and unplaced)  # of those that end at once, the device may be unknown
    assert lost_in_kernel(peak) == {}
    assert bounded(peak, load.containers)
    assert crowded.until_empty()
    for name in MAPS:
        until(lambda: not entries(crowded.agent.pid, name), f"the map {name} to be empty")  # noqa: B023
