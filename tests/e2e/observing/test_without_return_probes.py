# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An agent with --return-probes off: what it cannot know is unknown and not 0, and what cannot work is reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.core.model import Usage
from tests.e2e.node import Agent, Node
from tools.harness.wait import until

_MIB = 1 << 20
_SERVING = ("--rate", "50", "--kernels", "20", "--kernel-us", "200", "--seconds", "3600", "--start-now")
_TRAINING = ("--kernels", "40", "--kernel-us", "250", "--copy-bytes", "4MiB", "--memory", "512MiB", "--seconds", "3600")
_POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "training-{token}"}}
    limits: {{memory: 64GiB}}
    ladder: [gate, pace, deny, hold]
"""


@pytest.fixture(scope="module")
def blind(node: Node) -> Iterator[Agent]:
    """The agent, beside two containers that launch, copy and allocate."""
    options = ("--return-probes", "off")
    with (
        node.container("chat", "online", _SERVING),
        node.container("training", "offline", _TRAINING),
        node.agent(_POLICY.format(token=node.token), *options, run_dir="blind") as agent,
    ):
        until(lambda: usage(agent, node.name("training")).launches_per_second, "launches of the training container")
        yield agent


def usage(agent: Agent, name: str) -> Usage:
    """Of a container, on its only device."""
    row = agent.container(name)
    return row.usage[0] if row else Usage("", None, None, None, None, None, None)  # type: ignore[arg-type]


def test_memory_is_nvmls_and_what_needs_a_return_is_unknown(node: Node, blind: Agent) -> None:
    until(lambda: (usage(blind, node.name("training")).memory_bytes or 0) >= 512 * _MIB, "NVML's bytes")
    found = usage(blind, node.name("training"))
    assert (found.memory_by_kind, found.memory_by_age, found.memory_peak_bytes) == ({}, {}, None)
    assert (found.pcie_tx_bytes_per_second, found.pcie_rx_bytes_per_second) == (None, None)
    assert found.sm_ratio is not None


def test_the_log_the_metrics_and_the_snapshot_report_that_return_probes_are_off(node: Node, blind: Agent) -> None:
    assert blind.snapshot().return_probes_off == "--return-probes off"
    assert "return probes are off (--return-probes off): launches are counted" in blind.log.read_text()
    metrics = blind.metrics()
    assert "\ngpuwarden_return_probes 0.0\n" in metrics
    assert 'role="launch",state="off"} 0.0' in metrics
    assert not [line for line in metrics.splitlines() if 'role="alloc",state="off"} 0.0' in line]
    assert "gpuwarden_container_allocated_bytes{" not in metrics


def test_a_memory_limit_reports_that_nothing_is_denied_or_held(node: Node, blind: Agent) -> None:
    until(lambda: blind.stance(node.name("training")), "a decision about the training container")
    status = blind.stance(node.name("training"))
    assert status
    assert dict(status.troubles) == dict.fromkeys(("deny", "hold"), "return probes are off: --return-probes off")


def test_a_latency_by_waits_is_unknown_and_the_decision_says_why(node: Node, blind: Agent) -> None:
    def reason() -> str:
        status = blind.stance(node.name("training"))
        return (status.reason or "") if status else ""

    until(lambda: "signal gpu_wait" in reason(), "a decision")
    assert "signal gpu_wait: return probes are off: --return-probes off" in reason()
    online = blind.stance(node.name("chat"))
    assert online
    assert online.latency_seconds is None


def test_stacks_of_allocations_are_refused(node: Node) -> None:
    done = node.run("stacks", "--container", "any", "--kind", "alloc", "--return-probes", "off")
    assert done.returncode != 0
    assert "stacks of allocations need return probes, which are off: --return-probes off" in done.stderr
