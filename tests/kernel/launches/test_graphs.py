# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What launches of a graph count as, whatever was changed in it before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver, copied, kernels, launched, lost, memory
from tools.harness.node import BUILD

TYPES: Final = ("kernel", "copy", "set", "child")
CONTEXT_BYTES: Final = 520 << 20


@dataclass(slots=True)
class Node:
    """What it does: blocks of each kernel, or bytes."""

    type: str
    amount: int
    is_off: bool = False


@dataclass(slots=True)
class Model:
    """What graphs.c does, operation by operation."""

    graph: dict[int, Node] = field(default_factory=dict)
    executable: dict[int, Node] = field(default_factory=dict)
    made: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def carry_out(self, operation: str) -> None:
        name, *arguments = operation.split(":")
        first, second = (*map(int, arguments), 0, 0)[:2]
        if name in TYPES:
            self.graph[self.made] = Node(name, first)
            self.made += 1
        elif name == "change":
            self.graph[first].amount = second
        elif name == "remove":
            del self.graph[first]
        elif name in ("make", "update"):
            self.executable = deepcopy(self.graph)
        elif name == "exec_change":
            self.executable[first].amount = second
        elif name in ("on", "off"):
            self.executable[first].is_off = name == "off"
        elif name == "launch":
            self._launch()

    def _launch(self) -> None:
        for node in self.executable.values():
            if node.is_off:
                continue
            if node.type in ("kernel", "child"):
                count = 2 if node.type == "child" else 1
                self.done += Counter(kernels=count, blocks=count * node.amount)
            elif node.type == "copy":
                self.done += Counter(copies=1, copied=node.amount)
            else:
                self.done += Counter(sets=1, set=node.amount)


def counted(graphs: Driver, probes: LibcudaProbes, operations: Sequence[str]) -> Counter[str]:
    """What the probes' maps say that a program with these operations did."""
    process = graphs.run(*operations).process
    copies, sets = (copied(probes, process).get((0, name), (0, 0)) for name in ("host_to_device", "memset"))
    found = Counter(kernels=kernels(probes, process), copies=copies[0], copied=copies[1], sets=sets[0], set=sets[1])
    found["blocks"] = sum(blocks for _, blocks, _ in launched(probes, process).values())
    return +found


def done(operations: Sequence[str]) -> Counter[str]:
    model = Model()
    for operation in operations:
        model.carry_out(operation)
    return +model.done


@st.composite
def histories(draw: st.DrawFn) -> list[str]:
    """Operations that are allowed, one after another. The graph changes before the executable one is made."""
    amounts = st.integers(1, 5000)
    operations = [f"{draw(st.sampled_from(TYPES))}:{draw(amounts)}" for _ in range(draw(st.integers(1, 5)))]
    model = Model()
    for operation in operations:
        model.carry_out(operation)
    for _ in range(draw(st.integers(1, 4))):
        nodes = list(model.graph)
        for _ in range(draw(st.integers(0, 3))):
            number = draw(st.sampled_from(nodes))
            if model.graph[number].type != "child":
                operations.append(f"change:{number}:{draw(amounts)}")
        if len(nodes) > 1 and draw(st.booleans()):
            operations.append(f"remove:{nodes.pop(draw(st.integers(0, len(nodes) - 1)))}")
            model.carry_out(operations[-1])
        operations += ["make", "launch"]
        for _ in range(draw(st.integers(0, 4))):
            name, number = draw(st.sampled_from(("exec_change", "off", "on"))), draw(st.sampled_from(nodes))
            if model.graph[number].type == "child":
                name = "exec_change"
            operations.append(f"{name}:{number}" + (f":{draw(amounts)}" if name == "exec_change" else ""))
        operations.append("launch")
    return operations


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=histories())
def test_a_graph_counts_as_what_its_nodes_do_whatever_was_changed(
    graphs: Driver, own_probes: LibcudaProbes, operations: list[str]
) -> None:
    before = lost(own_probes)
    assert counted(graphs, own_probes, operations) == done(operations)
    assert lost(own_probes) == before


def held(graphs: Driver, probes: LibcudaProbes, operations: Sequence[str]) -> int:
    """What its graphs have at the end of a program: by the probes, and by the GPU, which agree."""
    with graphs.start(*operations) as program:
        program.begin()
        program.finish()
        command = [str(BUILD / "bin" / "gpusim"), "truth"]
        environment = {**os.environ, **graphs.node.environment}
        lines = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout
        (truth,) = (one for one in map(json.loads, lines.splitlines()) if one["pid"] == program.process.tgid)
        live = memory(probes, program.process)[0].live
        assert sum(live.values()) == truth["memory_bytes"] - CONTEXT_BYTES
    assert live.keys() <= {"plain", "graph"}
    return live.get("graph", 0)


@st.composite
def allocating(draw: st.DrawFn) -> tuple[list[str], int]:
    """Nodes that allocate and free, and the most that they have at a time."""
    operations: list[str] = []
    live: dict[int, int] = {}
    most = 0
    for number in range(draw(st.integers(1, 8))):
        if draw(st.booleans()) and live:
            operations.append(f"free:{draw(st.sampled_from(sorted(live)))}")
            del live[int(operations[-1].removeprefix("free:"))]
        else:
            live[number] = draw(st.integers(1, 256)) << 12
            operations.append(f"alloc:{live[number]}")
        most = max(most, sum(live.values()))
    return operations, most


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(allocating())
def test_an_executable_graph_holds_the_most_that_its_nodes_have_at_a_time(
    graphs: Driver, own_probes: LibcudaProbes, made: tuple[list[str], int]
) -> None:
    operations, most = made
    assert held(graphs, own_probes, [*operations, "make", "launch", "launch"]) == most


def test_a_graph_holds_memory_from_its_first_launch_until_it_is_destroyed(
    graphs: Driver, own_probes: LibcudaProbes
) -> None:
    made = ["kernel:1", f"alloc:{5 << 20}", "make"]
    assert held(graphs, own_probes, made) == 0
    assert held(graphs, own_probes, [*made, "launch"]) == 5 << 20
    assert held(graphs, own_probes, [*made, "launch", "free_outside:1", "launch"]) == 5 << 20
    assert held(graphs, own_probes, [*made, "launch", "destroy"]) == 0


def test_what_a_captured_stream_allocates_is_memory_of_the_graph(graphs: Driver, own_probes: LibcudaProbes) -> None:
    assert held(graphs, own_probes, [f"capture_memory:{3 << 20}:{4 << 20}"]) == 4 << 20


def test_an_update_takes_the_graph_as_it_is_then(graphs: Driver, own_probes: LibcudaProbes) -> None:
    changes = ["exec_change:0:9", "launch", "change:0:70", "launch", "update", "launch", "exec_change:0:5", "launch"]
    operations = ["kernel:2", "set:100", "make", *changes]
    assert counted(graphs, own_probes, operations) == done(operations)


def test_a_graph_that_is_captured_again_counts_as_what_was_captured_last(
    graphs: Driver, own_probes: LibcudaProbes
) -> None:
    assert counted(graphs, own_probes, ["again:7"]) == Counter(kernels=2, blocks=1 + 7)


def test_a_node_that_changed_in_the_graph_since_then_is_lost_and_the_sum_stays(
    graphs: Driver, fresh_probes: LibcudaProbes, tmp_path: Path
) -> None:
    own = replace(graphs, libcuda=tmp_path / "libcuda.so.1")  # what others see loses nothing
    shutil.copyfile(graphs.libcuda, own.libcuda)
    fresh_probes.ensure(str(own.libcuda))
    operations = ["kernel:2", "make", "change:0:3", "exec_change:0:4", "launch"]
    assert counted(own, fresh_probes, operations) == Counter(kernels=1, blocks=2)
    assert lost(fresh_probes) == {"node": 1}
