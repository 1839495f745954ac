# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The ledger of a real agent: what two containers did is in the report, adds up, and outlives agent and containers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.node import Node
from tools.harness.wait import until

LEARNING = ("--kernels", "40", "--kernel-us", "250", "--host-us", "2000", "--copy-bytes", "4MiB", "--seconds", "3600")


def report(node: Node, *words: str) -> dict[str, Any]:
    done = node.run("report", *node.ledger, "--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_containers_used_is_in_the_report_after_they_and_the_agent_ended(node: Node) -> None:
    with node.agent(None) as agent:
        with node.container("training-booked", "offline", (*LEARNING, "--memory", "1GiB")):
            name = node.name("training-booked")

            def launches() -> int:
                row = agent.container(name)
                return sum(usage.totals.launches for usage in row.usage) if row else 0

            until(lambda: launches() > 500, "launches")
        seen = launches()
    found = report(node, "--by", "container,device")
    (row,) = [row for row in found["rows"] if row["container"] == name]
    assert row["launches"] >= max(seen, 500)
    assert row["gib_hours"] > 0
    assert row["pcie_rx_bytes"] + row["pcie_tx_bytes"] > 0
    assert row["sm_seconds"] > 0
    for figure in ("sm_seconds", "launches", "gib_hours"):
        assert sum(row[figure] for row in found["rows"]) == pytest.approx(found["total"][figure])
        assert found["total"][figure] == pytest.approx(found["devices"][figure], rel=0.02)
    done = node.run("report", *node.ledger)
    assert (done.returncode, done.stderr) == (0, "")
    assert name in done.stdout
