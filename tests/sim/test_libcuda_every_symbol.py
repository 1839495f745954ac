# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The program that calls every symbol (every_symbol.c of tests/support/programs) and the simulated GPU agree on what
was done."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.probes.symbols import SYMBOLS
from tests.support.programs import every_symbol_calls
from tools.harness.node import BUILD, Node, simulated_node

_KINDS = ("plain", "managed", "pool", "virtual", "array", "graph")
_PRIMES = (2, 3, 5, 7, 11, 13)
_CONTEXT_BYTES = 520 << 20


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return every_symbol_calls.build(tmp_path_factory.mktemp("every_symbol") / "every_symbol")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with simulated_node(tmp_path_factory.mktemp("gpu"), {"gpus": "1", "memory": "2GiB"}) as node:
        yield node


def listed(program: Path, *arguments: str) -> list[str]:
    """What it can call."""
    return subprocess.run([program, "--list", *arguments], text=True, capture_output=True, check=True).stdout.split()


@contextmanager
def driven(program: Path, node: Node, plan: Mapping[str, int], *arguments: str) -> Iterator[tuple[int, Any]]:
    """Its pid and its report, while it lives on."""
    environment = {**os.environ, **node.environment, "LD_LIBRARY_PATH": str(BUILD / "lib")}
    pipe = subprocess.PIPE
    with subprocess.Popen([program, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin
            assert process.stdout
            process.stdin.write("".join(f"{name} {count}\n" for name, count in plan.items()) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("go\n")
            process.stdin.flush()
            yield process.pid, json.loads(process.stdout.readline())
            process.stdin.close()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def truth(node: Node, pid: int) -> Any:
    """What the simulated GPU did for a process."""
    command = [str(BUILD / "bin" / "gpusim"), "truth"]
    environment = {**os.environ, **node.environment}
    lines = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.splitlines()
    (found,) = [entry for entry in map(json.loads, lines) if entry["pid"] == pid]
    return found


def test_every_probed_symbol_can_be_called(program: Path) -> None:
    names = listed(program)
    assert len(names) == len(set(names))
    assert {symbol.name for symbol in SYMBOLS} <= set(names)


def test_the_gpu_did_what_the_program_reports(program: Path, node: Node) -> None:
    plan = {name: _PRIMES[i % len(_PRIMES)] for i, name in enumerate(listed(program))}
    with driven(program, node, plan, "4") as (pid, report):
        assert {name: symbol["calls"] for name, symbol in report["symbols"].items()} == plan
        assert not any(symbol["failed"] for symbol in report["symbols"].values())
        added, done = report["added"], truth(node, pid)
        assert done["kernels"] == added["launch"]["amount"]
        assert done["launches"] == added["launch"]["calls"]
        assert done["rx_bytes"] == added["to_device"]["amount"]
        assert done["tx_bytes"] == added["to_host"]["amount"]
        assert done["allocations"] == sum(added[f"alloc_{kind}"]["calls"] for kind in _KINDS)
        taken = sum(added[f"alloc_{kind}"]["amount"] for kind in _KINDS)
        freed = sum(added[f"free_{kind}"]["amount"] for kind in (*_KINDS, "with_context"))
        assert done["memory_bytes"] == _CONTEXT_BYTES + taken - freed


def test_allocations_that_fail_take_nothing(program: Path, node: Node) -> None:
    names = listed(program, "--fail")
    assert len(names) >= 20
    with driven(program, node, dict.fromkeys(names, 5), "3", "--fail") as (pid, report):
        assert {name: symbol["failed"] for name, symbol in report["symbols"].items()} == dict.fromkeys(names, 5)
        assert all(symbol["amount"] == 0 for symbol in report["symbols"].values())
        taken = sum(report["added"][f"alloc_{kind}"]["amount"] for kind in _KINDS)
        assert truth(node, pid)["memory_bytes"] == _CONTEXT_BYTES + taken


def test_what_is_not_planned_is_not_called(program: Path, node: Node) -> None:
    with driven(program, node, {"cuMemFree_v2": 3}) as (_, report):
        assert report["symbols"].keys() == {"cuMemFree_v2"}
        assert report["setup"]["cuMemAlloc_v2"] == 1 + 3
        assert "cuMemcpyHtoD_v2" not in report["setup"]
