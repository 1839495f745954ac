# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every probed symbol, called a prime number of times from several threads: the maps say exactly what was done."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent import preflight
from agent.model import ProcessId
from agent.probes import Probes
from agent.procfs import Procfs
from agent.symbols import SYMBOLS, Role
from tests.kernel.driven import Driver, copied, kernels, lost, memory

PRIMES = [n for n in range(2, 180) if all(n % d for d in range(2, int(n**0.5) + 1))]
DIRECTIONS = {
    "to_device": "host_to_device",
    "to_host": "device_to_host",
    "on_device": "device_to_device",
    "memset": "memset",
}
IN_CONTEXT = 4096  # bytes that a context holds when it is destroyed
KINDS = ("plain", "managed", "pool", "virtual", "array", "pinned")
BATCHES = [name for name in (symbol.name for symbol in SYMBOLS) if "Batch" in name]  # of two copies each


@contextmanager
def called(program: Path, driver: Driver, plan: Mapping[str, int], *arguments: str) -> Iterator[tuple[ProcessId, Any]]:
    """Who it is and what it says that it did, while it lives on."""
    environment = {**os.environ, **driver.node.environment, "LD_LIBRARY_PATH": str(driver.libcuda.parent)}
    pipe = subprocess.PIPE
    with subprocess.Popen([program, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin
            assert process.stdout
            process.stdin.write("".join(f"{name} {count}\n" for name, count in plan.items()) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            who = Procfs().process_id(process.pid)
            process.stdin.write("go\n")
            process.stdin.flush()
            yield who, json.loads(process.stdout.readline())
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def alone(driver: Driver) -> Iterator[Probes]:
    """Probes that see nobody but this module's programs."""
    with Probes(preflight.bpf_object(), Procfs()) as probes:
        assert not probes.ensure(str(driver.libcuda)).failed
        yield probes


def plan_of(names: Sequence[str]) -> dict[str, int]:
    return {name: PRIMES[number % len(PRIMES)] for number, name in enumerate(names)}


def grown(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def told(said: Any) -> dict[str, int]:
    """Calls by symbol: those that were planned, and those that these needed besides."""
    calls = {name: symbol["calls"] for name, symbol in said["symbols"].items()}
    for name, count in said["setup"].items():
        calls[name] = calls.get(name, 0) + count
    probed = {symbol.name for symbol in SYMBOLS}
    return {name: count for name, count in calls.items() if count and name in probed}


@pytest.mark.parametrize("threads", [1, 7])
def test_every_symbol_is_seen_exactly_as_often_as_it_is_called(
    every_symbol: Path, driver: Driver, alone: Probes, threads: int
) -> None:
    (library,) = alone.libraries()
    assert library.attached == [symbol.name for symbol in SYMBOLS]
    plan, before, lost_before = plan_of(library.attached), alone.calls(), lost(alone)
    with called(every_symbol, driver, plan, str(threads)) as (process, said):
        assert grown(alone.calls(), before) == told(said)
        added = said["added"]
        assert kernels(alone, process) == added["launch"]["amount"]
        extra = sum(said["symbols"][name]["calls"] for name in BATCHES)
        wanted = {
            (0, name): (added[effect]["calls"] + (extra if effect == "to_device" else 0), added[effect]["amount"])
            for effect, name in DIRECTIONS.items()
        }
        assert copied(alone, process) == wanted
        books = memory(alone, process)
        live = {}
        for kind in KINDS:
            freed = added[f"free_{kind}"]["amount"] + (added["free_with_context"]["amount"] if kind == "plain" else 0)
            if left := added[f"alloc_{kind}"]["amount"] - freed:
                live[kind] = left
        assert books[0].live == live
        assert books[0].allocations == sum(added[f"alloc_{kind}"]["calls"] for kind in KINDS)
        frees = sum(added[f"free_{kind}"]["calls"] for kind in KINDS)
        frees += added["free_with_context"]["amount"] // IN_CONTEXT  # some contexts hold nothing
        assert books[0].frees == frees
        assert books[0].failures == 0
        assert grown(lost(alone), lost_before) == {}


def test_what_failed_is_counted_as_failed_and_nothing_else(every_symbol: Path, driver: Driver, alone: Probes) -> None:
    plan = plan_of([symbol.name for symbol in SYMBOLS if symbol.role is Role.ALLOC])
    with called(every_symbol, driver, plan, "--fail", "5") as (process, said):
        failed = sum(symbol["failed"] for symbol in said["symbols"].values())
        assert failed == sum(plan.values())
        assert memory(alone, process)[0].failures == failed
