# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A share of time is that share of the GPU time of all launches, however often a process waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from agent.core.clock import monotonic_ns
from agent.probes.abi import RULE_PACE
from tests.e2e.kernel_maps import pace_of, rule_of
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
SHARE = 0.5
COUNTED = 100  # launches of each

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


def policy(node: Node, *, enforce: bool) -> str:
    return POLICY.format(enforce="true" if enforce else "false", token=node.token, share=SHARE)


def length_ns(shape: tuple[str, ...]) -> int:
    """Of each of its kernels."""
    return 1000 * int(shape[shape.index("--kernel-us") + 1])


def is_held(agent: Agent, batch: Container, kernel_ns: int) -> bool:
    """At the share, and a launch is taken to be about as long as it is."""
    rule = rule_of(agent.process.pid, batch.tgid)
    return (
        rule is not None
        and (rule.flags, rule.rate_ppm) == (RULE_PACE, SHARE * 1_000_000)
        and 0.67 * kernel_ns < rule.launch_ns < 1.5 * kernel_ns
    )


def charged_ns_of(agent: Agent, batch: Container) -> int:
    pace = pace_of(agent.process.pid, batch.tgid)
    return pace.charged_ns if pace else 0


def charged_part(node: Node, agent: Agent, batch: Container, kernel_ns: int) -> float:
    """What it is charged for the next launches, of the time that they take: all of them count."""
    began_ns, charged_ns, launches = monotonic_ns(), charged_ns_of(agent, batch), node.truth()[batch.tgid]
    until(lambda: node.truth()[batch.tgid] >= launches + COUNTED, "launches under the rule")
    charged_ns = charged_ns_of(agent, batch) - charged_ns
    assert charged_ns > 0.67 * kernel_ns * (COUNTED - 1)  # one was charged before
    return charged_ns / (monotonic_ns() - began_ns)


def test_a_share_is_the_same_part_of_each_kind_of_work(node: Node) -> None:
    with node.agent(policy(node, enforce=False)) as agent, ExitStack() as stack:
        for device in range(len(SHAPES)):
            stack.enter_context(node.tenant(f"chat-{device}", str(device), "online", *ONLINE))
        batches = start_batches(stack, node)
        until(lambda: all(node.truth().get(one.tgid, 0) > 0 for one in batches), "work of each")
        agent.reload(policy(node, enforce=True))
        for (name, shape), batch in zip(SHAPES.items(), batches, strict=True):
            kernel_ns = length_ns(shape)
            until(lambda: is_held(agent, batch, kernel_ns), f"the rule of {name}")  # noqa: B023
            until(lambda: charged_part(node, agent, batch, kernel_ns) < 0.7, f"{name} to be held")  # noqa: B023
