# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Beside an online container that copies all the time an offline one copies only when its longest pause is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.model import EnforcementStatus
from bench.pcie.run import compiled
from tests.e2e.node import Agent, Node, running_node, state
from tools.harness.containers import Container
from tools.harness.wait import until

POLICY = """\
version: 1
enforce: {enforce}
pcie: {{pace: true}}
online:
  - name: chat
    match: {{cgroup: "*/{token}/chat"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{cgroup: "*/{token}/training"}}
    weight: 2
    limits: {{max_pause: {max_pause}}}
    ladder: [pace]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With the program that copies in its folder."""
    folder = tmp_path_factory.mktemp("copies") / "n"
    with running_node(folder) as node:
        yield node


@dataclass(frozen=True, slots=True)
class Pair:
    """Both copy to the device for as fast as they can."""

    agent: Agent
    online: Container
    offline: Container

    def status(self, of: Container) -> EnforcementStatus | None:
        """What enforcement reports about it."""
        snapshot = self.agent.snapshot()
        for row in snapshot.containers:
            if any(process.tgid == of.tgid for process in row.processes):
                return snapshot.enforcement.get(row.container.key)
        return None

    def copy_pauses(self) -> int:
        """Of the offline one."""
        found = self.status(self.offline)
        return found.copy_pauses_total if found else 0


@pytest.fixture
def pair(node: Node) -> Iterator[Pair]:
    program = str(compiled(Path(node.folder)))
    policy = POLICY.format(token=node.token, enforce="true", max_pause="50ms")
    with (
        node.agent(policy) as agent,
        node.tenant("chat", "0", program, "load", "64000000", "3") as online,
        node.tenant("training", "0", program, "load", "1000000", "1") as offline,
    ):
        yield Pair(agent, online, offline)


def copied(node: Node, container: Container) -> int:
    return sum(int(row["rx_bytes"]) for row in node.stage.truth() if row["pid"] == container.tgid)


def test_an_offline_container_waits_at_its_copies_and_runs_on_when_the_agent_is_killed(node: Node, pair: Pair) -> None:
    until(lambda: pair.copy_pauses() > 10, "the offline container to be stopped at its copies")
    until(lambda: "gpuwarden_container_pcie_pauses_total{" in pair.agent.metrics(), "the metric")
    offline, online = pair.status(pair.offline), pair.status(pair.online)
    assert offline is not None
    assert online is not None
    assert offline.reason is not None
    assert "copies paced with weight 2" in offline.reason
    assert "0.5 ms" in offline.reason
    assert offline.copy_paused_seconds_total > 0
    assert (online.pauses_total, online.copy_pauses_total) == (0, 0)

    before = copied(node, pair.offline)
    until(lambda: copied(node, pair.offline) >= before + 5_000_000, "it to copy after each of its longest pauses")

    pair.agent.reload(POLICY.format(token=node.token, enforce="true", max_pause="10s"))
    until(lambda: state(pair.offline.tgid) == "T", "it to be stopped for long")
    guardian = pair.agent.guardian()
    pair.agent.process.kill()
    pair.agent.process.wait(timeout=120)
    before = copied(node, pair.offline)
    until(lambda: copied(node, pair.offline) >= before + 100_000_000, "it to copy freely")
    until(lambda: state(guardian) in ("", "Z", "X"), "the guardian to end")
    assert state(pair.offline.tgid) != "T"
