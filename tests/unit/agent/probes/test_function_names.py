# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How many names of kernel functions are kept, and whose."""

from __future__ import annotations

from agent.core.model import ProcessId
from agent.probes.events import FunctionNames


def test_whatever_names_one_container_invents_there_is_room_for_those_of_the_next() -> None:
    names = FunctionNames(most=1000, owner=lambda process: process.tgid // 100)
    for tgid in range(100, 200):
        for function in range(1000):
            names.learn(ProcessId(tgid, 1), function, f"invented_{function}")
    assert len(names) == 500
    assert names.refused == 100 * 1000 - 500
    names.learn(ProcessId(200, 1), 7, "gemm")
    assert names.name(ProcessId(200, 1), 7) == "gemm"


def test_what_ended_processes_had_is_free_again() -> None:
    names = FunctionNames(most=4, owner=lambda process: process.tgid)
    for function in range(4):
        names.learn(ProcessId(1, 1), function, "f")
    names.forget([ProcessId(1, 1)])
    for function in range(4):
        names.learn(ProcessId(2, 1), function, "g")
    assert [names.name(ProcessId(2, 1), function) for function in range(4)] == ["g", "g", "", ""]
