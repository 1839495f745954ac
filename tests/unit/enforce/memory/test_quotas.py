# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The entry of a memory rule stays in the ledger until its process is seen running or has ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from enforce.ledger.ledger import Ledger
from enforce.memory.quotas import AllocationRule, MemoryQuotas
from enforce.model import Target
from tests.support.processes import show_process

PROCESS = ProcessId(7, 1)
BOUND = AllocationRule(Target(PROCESS, ContainerKey("c"), (0,), None), deny=True, hold=True, max_hold_ns=1)


class KernelMap:
    """A BPF map as a dict."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}

    def items(self) -> Iterator[tuple[bytes, Any]]:
        return iter(self.values.items())

    def put(self, key: Any, value: Any) -> None:
        self.values[bytes(key)] = value

    def delete(self, key: Any) -> None:
        self.values.pop(bytes(key), None)


@pytest.mark.parametrize("state", ["T", "D"])  # D: frozen by a v1 freezer, and perhaps stopped as well
def test_the_entry_of_a_process_that_may_still_be_stopped_stays_until_it_runs(tmp_path: Path, state: str) -> None:
    ledger, maps = Ledger(tmp_path / "ledger"), KernelMap()
    quotas: Any = MemoryQuotas(lambda _name: maps, ledger, Procfs(str(tmp_path)))  # type: ignore[arg-type,return-value]
    show_process(tmp_path, PROCESS, state)
    quotas.put({PROCESS: BOUND}, {}, 0)
    quotas.release_all()
    quotas.release_all()
    assert [entry.act for entry in ledger.outstanding()] == ["hold"]
    show_process(tmp_path, PROCESS, "S")
    quotas.release_all()
    assert ledger.outstanding() == []
