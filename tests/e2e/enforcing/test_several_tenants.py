# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Two GPUs, online and offline containers on each, one on both, two in one pod: each is held for its own devices."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator

import pytest

from agent.core.model import EnforcementStatus
from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node
from tools.harness.containers import Container
from tools.harness.node import simulated_node
from tools.harness.wait import until

POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{cgroup: "*/{token}*/chat*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
  - name: in-a-pod
    match: {{cgroup: "*/{token}*/{online}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{cgroup: ["*/{token}*/training*", "*/{token}*/{offline}"]}}
    limits: {{max_pause: 200ms, floor: 0%}}
    ladder: [gate, pace]
"""
ONLINE_ID, OFFLINE_ID = secrets.token_hex(32), secrets.token_hex(32)  # as a runtime under Kubernetes names them
POD = f"pod{uuid.uuid4()}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With two GPUs."""
    folder = tmp_path_factory.mktemp("tenants") / "n"
    with simulated_node(folder / "gpu", {"gpus": "2"}):
        yield Node(folder)


def stance(agent: Agent, container: Container) -> EnforcementStatus | None:
    """What enforcement reports about it."""
    snapshot = agent.snapshot()
    for row in snapshot.containers:
        if any(process.tgid == container.tgid for process in row.processes):
            return snapshot.enforcement.get(row.container.key)
    return None


def stops(agent: Agent, container: Container) -> int:
    found = stance(agent, container)
    return found.pauses_total if found else 0


def until_stopped_again(agent: Agent, container: Container, what: str) -> None:
    before = stops(agent, container)
    until(lambda: stops(agent, container) > before + 2, f"{what} to be stopped")


def test_offline_work_is_held_for_the_online_containers_of_its_own_devices(node: Node) -> None:
    policy = POLICY.format(token=node.token, online=ONLINE_ID, offline=OFFLINE_ID)
    with (
        node.agent(policy) as agent,
        node.tenant(ONLINE_ID, "0", "online", *ALWAYS_BUSY, pod=f"/{POD}"),
        node.tenant(OFFLINE_ID, "0", "offline", *TRAINING, pod=f"/{POD}") as beside,
        node.tenant("training-first", "0", "offline", *TRAINING) as first,
        node.tenant("training-second", "1", "offline", *TRAINING) as second,
        node.tenant("training-both", "0,1", "offline", *TRAINING, "--devices", "0,1") as both,
    ):
        until_stopped_again(agent, beside, "the container in the online container's pod")
        until_stopped_again(agent, first, "the container on its device")
        until_stopped_again(agent, both, "the container on its device too")
        launched = node.truth()[second.tgid]
        until(lambda: node.truth()[second.tgid] > launched + 100, "the container elsewhere to work on")
        assert stops(agent, second) == 0
        with node.tenant("chat-late", "1", "online", *ALWAYS_BUSY):
            until_stopped_again(agent, second, "the container with an online neighbour now")
            until_stopped_again(agent, first, "the container that still has one")
        released = stance(agent, second)
        assert released is not None
        assert released.role == "offline"
        until(lambda: settled(agent, second), "the container that is alone again to be left alone")


def settled(agent: Agent, container: Container) -> bool:
    """Not stopped from one tick to the next."""
    before = stops(agent, container)
    at_ns = agent.snapshot().at_ns
    until(lambda: agent.snapshot().at_ns > at_ns, "another tick")
    return stops(agent, container) == before
