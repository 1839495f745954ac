# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A share of time is that share of what a process did before, however often it waits for its work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from tests.e2e.node import Agent, Node
from tools.harness.containers import Container
from tools.harness.node import simulated_node
from tools.harness.wait import until

SHAPES = {
    "one-long": ("--kernels", "1", "--kernel-us", "5000"),
    "a-few": ("--kernels", "10", "--kernel-us", "1000"),
    "many": ("--kernels", "100", "--kernel-us", "500"),
    "no-wait": ("--kernels", "10", "--kernel-us", "1000", "--never-sync", "--iterations-per-us", "100"),
}
ONLINE = ("--rate", "5", "--kernels", "1", "--kernel-us", "100", "--seconds", "3600", "--start-now")
MEASURED_SECONDS = 3.0
LEARNING_SECONDS = 6.0
SHARE = 0.5

POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: chat
    match: {{cgroup: "*/{token}/chat-*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: batch
    match: {{cgroup: "*/{token}/batch-*"}}
    law: fixed
    share: {share}
    limits: {{max_pause: 200ms, floor: 0%}}
    ladder: [pace]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With a GPU for each shape."""
    folder = tmp_path_factory.mktemp("share") / "n"
    with simulated_node(folder / "gpu", {"gpus": str(len(SHAPES))}):
        yield Node(folder)


def start_batches(stack: ExitStack, node: Node) -> list[Container]:
    """One for each shape, each on its own device."""
    return [
        stack.enter_context(node.tenant(f"batch-{name}", str(device), "offline", *shape, "--seconds", "3600"))
        for device, (name, shape) in enumerate(SHAPES.items())
    ]


def rates(node: Node, containers: Sequence[Container], seconds: float = MEASURED_SECONDS) -> list[float]:
    """Launches per second of each."""
    before, began = node.truth(), time.monotonic()
    time.sleep(seconds)  # the time in which launches are counted
    after, lasted = node.truth(), time.monotonic() - began
    return [(after[one.tgid] - before[one.tgid]) / lasted for one in containers]


def policy(node: Node, *, enforce: bool) -> str:
    return POLICY.format(enforce="true" if enforce else "false", token=node.token, share=SHARE)


def until_held(agent: Agent, count: int) -> None:
    until(
        lambda: sum(one.pauses_total > 0 for one in agent.snapshot().enforcement.values()) >= count,
        "the first pause of each",
    )


def test_a_share_is_the_same_part_of_each_kind_of_work(node: Node) -> None:
    with node.agent(policy(node, enforce=False)) as agent, ExitStack() as stack:
        for device in range(len(SHAPES)):
            stack.enter_context(node.tenant(f"chat-{device}", str(device), "online", *ONLINE))
        batches = start_batches(stack, node)
        until(lambda: all(node.truth().get(one.tgid, 0) > 0 for one in batches), "work of each")
        time.sleep(1)  # past the start, which is no steady work
        alone = rates(node, batches)
        agent.reload(policy(node, enforce=True))
        until_held(agent, len(SHAPES))
        time.sleep(LEARNING_SECONDS)  # for the law to settle: what is measured is the share after that
        held = rates(node, batches)
    parts = {name: after / before for name, before, after in zip(SHAPES, alone, held, strict=True)}
    by_nvml = parts.pop("no-wait")  # whose percents and seconds are coarser than a process's own waits
    assert all(0.45 <= part <= 0.55 for part in parts.values()), parts
    assert 0.35 <= by_nvml <= 0.65
