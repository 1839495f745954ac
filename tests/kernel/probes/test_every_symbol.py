# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every probed symbol, called a prime number of times from several threads: the maps say exactly what was done."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from agent.probes.symbols import SYMBOLS, SymbolRole
from tests.support.programs import every_symbol_calls as calls
from tests.support.programs.driver import Driver, copied, kernels, lost, memory
from tests.support.programs.every_symbol_calls import grown, plan_of, reported

DIRECTIONS = {
    "to_device": "host_to_device",
    "to_host": "device_to_host",
    "on_device": "device_to_device",
    "memset": "memset",
}
IN_CONTEXT = 4096  # bytes that a context holds when it is destroyed
KINDS = ("plain", "managed", "pool", "virtual", "array", "graph", "pinned")
BATCHES = [name for name in (symbol.name for symbol in SYMBOLS) if "Batch" in name]  # of two copies each


@pytest.fixture(scope="module", params=[10, 0], ids=["checked", "plain"])
def driver(request: pytest.FixtureRequest, driver: Driver, plain_driver: Driver) -> Driver:
    """With either way in which a libcuda begins its functions."""
    return driver if request.param else plain_driver


def test_probes_stand_on_the_first_instruction_that_the_kernel_emulates(
    request: pytest.FixtureRequest, own_probes: LibcudaProbes
) -> None:
    (library,) = own_probes.libraries()
    expected = request.node.callspec.params["driver"] if platform.machine() == "x86_64" else 0
    assert {place.distance for place in library.places.values()} == {expected}


@contextmanager
def called(program: Path, driver: Driver, plan: Mapping[str, int], *arguments: str) -> Iterator[tuple[ProcessId, Any]]:
    """Its identity and what it reports that it did, while it lives on."""
    environment = {**os.environ, **driver.node.environment, "LD_LIBRARY_PATH": str(driver.libcuda.parent)}
    pipe = subprocess.PIPE
    with subprocess.Popen([program, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin
            assert process.stdout
            calls.prepare(process.stdin, process.stdout, plan)
            identity = Procfs().process_id(process.pid)
            yield identity, calls.carry_out(process.stdin, process.stdout)
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("threads", [1, 7])
def test_every_symbol_is_seen_exactly_as_often_as_it_is_called(
    every_symbol: Path, driver: Driver, own_probes: LibcudaProbes, threads: int
) -> None:
    (library,) = own_probes.libraries()
    assert library.attached == [symbol.name for symbol in SYMBOLS]
    plan, before, lost_before = plan_of(library.attached), own_probes.calls(), lost(own_probes)
    with called(every_symbol, driver, plan, str(threads)) as (process, report):
        assert grown(own_probes.calls(), before) == reported(report)
        added = report["added"]
        assert kernels(own_probes, process) == added["launch"]["amount"]
        extra = sum(report["symbols"][name]["calls"] for name in BATCHES)
        wanted = {
            (0, name): (added[effect]["calls"] + (extra if effect == "to_device" else 0), added[effect]["amount"])
            for effect, name in DIRECTIONS.items()
        }
        assert copied(own_probes, process) == wanted
        totals = memory(own_probes, process)
        live = {}
        for kind in KINDS:
            freed = added[f"free_{kind}"]["amount"] + (added["free_with_context"]["amount"] if kind == "plain" else 0)
            if left := added[f"alloc_{kind}"]["amount"] - freed:
                live[kind] = left
        assert totals[0].live == live
        assert totals[0].allocations == sum(added[f"alloc_{kind}"]["calls"] for kind in KINDS)
        frees = sum(added[f"free_{kind}"]["calls"] for kind in KINDS)
        frees += added["free_with_context"]["amount"] // IN_CONTEXT  # some contexts hold nothing
        assert totals[0].frees == frees
        assert totals[0].failures == 0
        assert grown(lost(own_probes), lost_before) == {}


def test_what_failed_is_counted_as_failed_and_nothing_else(
    every_symbol: Path, driver: Driver, own_probes: LibcudaProbes
) -> None:
    plan = plan_of([symbol.name for symbol in SYMBOLS if symbol.role is SymbolRole.ALLOC])
    with called(every_symbol, driver, plan, "--fail", "5") as (process, report):
        failed = sum(symbol["failed"] for symbol in report["symbols"].values())
        assert failed == sum(plan.values())
        assert memory(own_probes, process)[0].failures == failed
