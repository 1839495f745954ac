# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a context held goes with it, at a cost that does not grow with what the node has allocated."""

from __future__ import annotations

import time

from agent.collectors.memory import Allocations
from agent.core.model import ProcessId
from agent.probes.abi import Allocation, AllocationKey, ProcessKey
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, memory

MIB = 1 << 20
_MANY = 60_000  # allocations of another process
_CONTEXTS = 1000


def _singles(probes: LibcudaProbes, process: ProcessId) -> int:
    return sum(key.process.id() == process for key, _ in probes.map("allocations").items())


def test_the_sums_go_at_once_and_the_allocations_with_the_next_tick(driver: Driver, probes: LibcudaProbes) -> None:
    with driver.start(f"alloc:{MIB}", "new:0", f"3*alloc:{MIB}", "destroy", f"alloc:{MIB}") as driven:
        driven.begin()
        driven.finish()
        found = memory(probes, driven.process)[0]
        assert (found.live, found.allocations, found.frees) == ({"plain": 2 * MIB}, 5, 3)
        collector = Allocations(probes)
        for _ in range(3):  # found, taken out, forgotten
            list(collector.collect(0))
        assert _singles(probes, driven.process) == 2
        contexts = [(key.process.id(), sums.ended_ns) for key, sums in probes.map("context_memories").items()]
        assert [ended_ns for process, ended_ns in contexts if process == driven.process] == [0]


def test_a_process_that_ended_its_contexts_leaves_nothing(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("new:0", f"3*alloc:{MIB}", "destroy")
    collector = Allocations(probes)
    list(collector.collect(0))
    collector.forget([driven.process])
    assert _singles(probes, driven.process) == 0
    assert driven.process not in [key.process.id() for key, _ in probes.map("context_memories").items()]


def test_the_end_of_a_context_costs_the_same_whatever_others_have_allocated(
    driver: Driver, probes: LibcudaProbes
) -> None:
    rounds = ("new:0", "destroy") * _CONTEXTS
    alone = min(_seconds(driver, *rounds) for _ in range(3))
    other, allocations = ProcessId(1 << 22, 1), probes.map("allocations")
    keys = [AllocationKey(ProcessKey.of(other), 0, 0, pointer) for pointer in range(_MANY)]
    try:
        for key in keys:
            allocations.put(key, Allocation(bytes=1, at_ns=1, references=1))
        among_many = min(_seconds(driver, *rounds) for _ in range(3))
    finally:
        for key in keys:
            allocations.delete(key)
    print(f"{_CONTEXTS} contexts: {alone:.3f} s alone, {among_many:.3f} s among many")
    assert among_many - alone < _CONTEXTS * 0.001  # looking through them took 5 ms each


def _seconds(driver: Driver, *operations: str) -> float:
    with driver.start(*operations) as driven:
        return _until_done(driven)


def _until_done(driven: Driven) -> float:
    began = time.monotonic()
    driven.begin()
    driven.finish()
    return time.monotonic() - began
