# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A map that is full loses detail, reports it, and loses no launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from agent.collectors.launches import Launches
from agent.collectors.memory import Allocations
from agent.collectors.samples import LaunchCount
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes import libbpf
from agent.probes.libbpf import BpfObject
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver, launched, lost

ROOM = 3
GRID = "2x1x1:32x1x1"


@pytest.fixture
def cramped_probes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[LibcudaProbes]:
    """With a map `launches` of three entries."""
    monkeypatch.setattr(libbpf, "BpfObject", partial(BpfObject, max_entries={"launches": ROOM}))
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        probes.ensure(str(driver.libcuda))
        yield probes


def test_a_full_map_of_launches_loses_none(driver: Driver, cramped_probes: LibcudaProbes) -> None:
    first = driver.run(*(f"{kernel + 2}*launch:{GRID}:{kernel}" for kernel in range(5)))
    second = driver.run(f"23*launch:{GRID}:1")  # the map was full before it came
    assert launched(cramped_probes, first.process) == {
        (0, first.function(kernel)): (kernel + 2, 2 * (kernel + 2), 32) for kernel in range(ROOM)
    }
    assert launched(cramped_probes, first.process, "other_launches") == {(0, 0): (5 + 6, 2 * (5 + 6), 32)}
    assert launched(cramped_probes, second.process, "other_launches") == {(0, 0): (23, 46, 32)}
    assert lost(cramped_probes) == {"launch_function": 5 + 6 + 23}


def test_launches_of_a_full_map_are_collected_under_no_function(driver: Driver, cramped_probes: LibcudaProbes) -> None:
    driven = driver.run(*(f"launch:{GRID}:{kernel}" for kernel in range(5)))
    collector = Launches(cramped_probes)
    samples = [sample for sample in collector.collect(0) if isinstance(sample, LaunchCount)]
    counts = {sample.function: sample.launches for sample in samples if sample.process == driven.process}
    assert counts == {0: 2, **{driven.function(kernel): 1 for kernel in range(ROOM)}}
    collector.forget([driven.process])
    assert not [sample for sample in collector.collect(0) if isinstance(sample, LaunchCount)]


def test_an_allocation_that_there_is_no_sum_for_is_not_kept_either(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libbpf, "BpfObject", partial(BpfObject, max_entries={"memory": 1}))
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        probes.ensure(str(driver.libcuda))
        first, second = driver.run("2*alloc:4096"), driver.run("3*alloc:4096")
        kept = [key.process.id() for key, _ in probes.map("allocations").items()]
        assert kept == [first.process] * 2
        assert lost(probes) == {"memory": 3}
        collector = Allocations(probes)
        list(collector.collect(0))
        collector.forget([first.process, second.process])
        assert not list(probes.map("allocations").items())
