# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every launch is counted, once, with its grid, for its process, device and function."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest

from agent.attribution.contention import waves
from agent.probes.abi import DEVICE_UNKNOWN
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, Launched, kernels, launched, lost, run_together, start_all

PROCESSES, THREADS, LAUNCHES = 5, 3, 23
BLOCKS, BLOCK_THREADS = 3 * 5 * 7, 2 * 11 * 13
SMS = 132
GRID = "3x5x7:2x11x13"
THROUGH = pytest.mark.parametrize("through", ["symbol", "pointer"])
STREAMS = pytest.mark.parametrize("streams", ["legacy", "per-thread"])


def programs(stack: ExitStack, driver: Driver, through: str) -> list[Driven]:
    operation = f"{LAUNCHES}*launch:{GRID}"
    return start_all(stack, driver, PROCESSES, f"threads={THREADS}", f"through={through}", operation)


def exactly(driven: Driven, device: int) -> Launched:
    count = THREADS * LAUNCHES
    return {(device, driven.function(0)): (count, count * BLOCKS, BLOCK_THREADS)}


@THROUGH
def test_every_launch_of_processes_that_started_before_the_probes_is_counted_once(
    driver: Driver, fresh_probes: LibcudaProbes, through: str
) -> None:
    with ExitStack() as stack:
        running = programs(stack, driver, through)
        fresh_probes.ensure(str(driver.libcuda))
        run_together(running)
        for driven in running:  # their contexts were made unseen: which device it is, NVML has to say
            assert launched(fresh_probes, driven.process) == exactly(driven, DEVICE_UNKNOWN)
    assert not lost(fresh_probes)


@THROUGH
def test_every_launch_of_processes_that_start_after_the_probes_is_counted_once(
    driver: Driver, own_probes: LibcudaProbes, through: str
) -> None:
    with ExitStack() as stack:
        running = programs(stack, driver, through)
        run_together(running)
        for driven in running:
            assert launched(own_probes, driven.process) == exactly(driven, 0)
    assert not lost(own_probes)


@STREAMS
@THROUGH
@pytest.mark.parametrize("kind", ["launch", "launch_ex", "launch_cooperative"])
def test_every_kind_of_launch_is_counted_once_with_its_grid(
    driver: Driver, probes: LibcudaProbes, kind: str, through: str, streams: str
) -> None:
    operation = f"{LAUNCHES}*{kind}:{GRID}:2"
    driven = driver.run(f"threads={THREADS}", f"through={through}", f"streams={streams}", operation)
    count = THREADS * LAUNCHES
    assert launched(probes, driven.process) == {(0, driven.function(2)): (count, count * BLOCKS, BLOCK_THREADS)}


@STREAMS
@THROUGH
def test_a_graph_counts_its_kernel_nodes_at_each_launch(
    driver: Driver, probes: LibcudaProbes, through: str, streams: str
) -> None:
    driven = driver.run(f"through={through}", f"streams={streams}", "graph:17")
    ((device, executable), counts), *others = launched(probes, driven.process).items()
    assert not others
    assert device == 0
    assert executable not in driven.functions
    assert counts == (17, 17 * 3 * 2, 32)
    assert kernels(probes, driven.process) == 17 * 3


def test_a_graph_that_is_updated_counts_the_blocks_that_it_has_since(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("graph:5:11")
    ((_, counts),) = launched(probes, driven.process).items()
    assert counts == (5 + 11, (5 * 2 + 11 * 7) * 3, 32)
    assert kernels(probes, driven.process) == (5 + 11) * 3


@pytest.mark.parametrize("grid", ["1x1x1:32x1x1", "131x1x1:1024x1x1", "133x1x1:1024x1x1", "70x70x1:64x2x1"])
def test_waves_of_blocks_are_counted_as_the_agent_works_them_out(
    driver: Driver, own_probes: LibcudaProbes, grid: str
) -> None:
    own_probes.set_sm_count(SMS)
    driven = driver.run(f"3*launch:{grid}", f"launch:{GRID}:0", "graph:5")
    blocks, threads = (math.prod(int(n) for n in part.split("x")) for part in grid.split(":"))
    of_grid, of_other = waves(blocks, threads, SMS), waves(BLOCKS, BLOCK_THREADS, SMS)
    counts = {
        key.function: (value.waves, value.wave_sms)
        for key, value in own_probes.map("launches").items()
        if key.process.id() == driven.process
    }
    assert counts.pop(driven.function(0)) == tuple(3 * a + b for a, b in zip(of_grid, of_other, strict=True))
    assert list(counts.values()) == [tuple(5 * 3 * n for n in waves(2, 32, SMS))]


def test_functions_are_counted_apart(driver: Driver, probes: LibcudaProbes) -> None:
    wanted = {0: (2, 3), 1: (3, 5), 5: (7, 11)}
    operations = [f"{count}*launch:{blocks}x1x1:32x1x1:{kernel}" for kernel, (count, blocks) in wanted.items()]
    driven = driver.run(*operations)
    assert launched(probes, driven.process) == {
        (0, driven.function(kernel)): (count, count * blocks, 32) for kernel, (count, blocks) in wanted.items()
    }


def test_a_grid_larger_than_32_bits_is_counted_whole(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("launch:2147483647x3x1:1024x1x1:0:1")
    assert launched(probes, driven.process) == {(0, driven.function(0)): (1, 2147483647 * 3, 1024)}


def test_launches_go_to_the_device_that_is_current(driver: Driver, probes: LibcudaProbes) -> None:
    one = "launch:1x1x1:32x1x1"
    driven = driver.run(
        f"2*{one}",  # on 0
        "set:1",
        f"3*{one}",
        "push:0",
        f"5*{one}",
        "push:1",
        f"7*{one}",
        "pop",
        f"11*{one}",  # on 0 again
        "pop",
        f"13*{one}",  # on 1 again
        "set:0",
        f"17*{one}",
    )
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(0, driven.function(0)): 2 + 5 + 11 + 17, (1, driven.function(0, device=1)): 3 + 7 + 13}


def test_a_context_of_its_own_is_on_the_device_that_it_was_made_for(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("new:1", "3*launch:1x1x1:32x1x1", "pop", "5*launch:1x1x1:32x1x1")
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(0, driven.function(0)): 5, (1, driven.function(0, device=1)): 3}


def test_setting_no_context_uncovers_the_one_below(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("push:1", "unset", "3*launch:1x1x1:32x1x1")
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(0, driven.function(0)): 3}


def test_a_context_that_could_not_be_set_changes_nothing(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("set:1", "set_wrong", "3*launch:1x1x1:32x1x1")
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(1, driven.function(0, device=1)): 3}


@pytest.mark.parametrize("through", ["symbol", "pointer"])
def test_a_green_context_is_on_the_device_that_it_was_made_for(
    driver: Driver, probes: LibcudaProbes, through: str
) -> None:
    one = "launch:1x1x1:32x1x1"
    driven = driver.run(f"through={through}", "green:1", f"3*{one}", "pop", f"5*{one}", "green_destroy", f"7*{one}")
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(0, driven.function(0)): 5 + 7, (1, driven.function(0, device=1)): 3}


def test_contexts_are_known_eight_deep_and_deeper_ones_are_not_guessed(driver: Driver, probes: LibcudaProbes) -> None:
    one = "launch:1x1x1:32x1x1"
    driven = driver.run("6*push:0", "push:1", f"3*{one}", "push:1", f"5*{one}", "pop", f"7*{one}")
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(1, driven.function(0, device=1)): 3 + 7, (DEVICE_UNKNOWN, driven.function(0, device=1)): 5}


def test_threads_have_devices_of_their_own(driver: Driver, probes: LibcudaProbes) -> None:
    operations = ("launch:1x1x1:32x1x1", "set:1", "launch:1x1x1:32x1x1")
    driven = driver.run("threads=7", *operations)
    counts = {key: count for key, (count, _, _) in launched(probes, driven.process).items()}
    assert counts == {(0, driven.function(0)): 7, (1, driven.function(0, device=1)): 7}
