# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Numbers that no device has, through a libcuda of the tenant's own that says success to everything: what the kernel
counts of them is bounded, reported, and adds to no other tenant."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.collectors.memory import Allocations
from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from tests.hostile.programs import compile_program, pretended_libcuda
from tests.support.programs.driver import copied, kernels, launched, lost, memory

MOST_BYTES, MOST_KERNELS, MOST_GRID_BLOCKS, MOST_ORDINALS = 1 << 46, 1 << 20, 1 << 36, 64


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tenant's own libcuda.so.1."""
    return pretended_libcuda(tmp_path_factory.mktemp("pretended"))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("big_numbers", tmp_path_factory.mktemp("big"))


@pytest.fixture
def probes(library: Path) -> Iterator[LibcudaProbes]:
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        assert not probes.ensure(str(library)).failed
        yield probes


@contextmanager
def running(program: Path, library: Path, *what: str) -> Iterator[ProcessId]:
    """It has done all that, and lives."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    with subprocess.Popen([program, *what], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "done\n"
            yield Procfs().process_id(process.pid)
        finally:
            process.kill()


def test_sizes_that_no_device_has_are_counted_and_not_booked(
    probes: LibcudaProbes, program: Path, library: Path
) -> None:
    with running(program, library, "sizes") as process:
        ((_, found),) = memory(probes, process).items()
        assert 0 < found.live["plain"] < MOST_BYTES
        assert found.peak < MOST_BYTES
        ((calls, copied_bytes),) = copied(probes, process).values()
        assert (calls, copied_bytes <= 128 * MOST_BYTES) == (128, True)
        assert lost(probes)["bounds"] >= 128
        (count,) = [one for one in Allocations(probes).collect(0) if hasattr(one, "live_bytes")]
        assert 0 < count.live_bytes["plain"] < MOST_BYTES


def test_a_graph_that_holds_itself_44_times_is_no_more_kernels_than_a_graph_can_have(
    probes: LibcudaProbes, program: Path, library: Path
) -> None:
    with running(program, library, "graph") as process:
        assert kernels(probes, process) == 1000 * MOST_KERNELS
        assert sum(count for count, *_ in launched(probes, process).values()) == 1000
        assert lost(probes)["bounds"] > 0


def test_a_grid_beyond_64_bits_is_no_more_blocks_than_a_device_can_run(
    probes: LibcudaProbes, program: Path, library: Path
) -> None:
    with running(program, library, "grids") as process:
        assert list(launched(probes, process).values()) == [(1000, 1000 * MOST_GRID_BLOCKS, 1)]
        assert lost(probes)["bounds"] == 1000


def test_devices_that_a_process_invents_are_one_unknown_device(
    probes: LibcudaProbes, program: Path, library: Path
) -> None:
    with running(program, library, "ordinals") as process:
        found = launched(probes, process)
        assert len(found) == MOST_ORDINALS + 1
        assert sum(count for count, *_ in found.values()) == 8300
        assert len(memory(probes, process)) == MOST_ORDINALS + 1
        assert lost(probes)["ordinal"] >= 8300 - MOST_ORDINALS


def test_the_end_of_a_context_that_never_was_looks_through_no_allocations(
    probes: LibcudaProbes, program: Path, library: Path
) -> None:
    assert probes.libraries()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    runs = [
        subprocess.run([program, "destroy"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        for _ in range(3)
    ]
    ratio = min(float(run.stdout.split()[0]) for run in runs)
    print(f"{ratio:.1f} times as long")
    assert ratio < 30  # looking through all allocations of the node took hundreds of times
