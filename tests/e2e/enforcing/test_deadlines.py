# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Two periodic containers take turns on a GPU; offline work beside them gives way; and without an agent all run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from agent.core.model import PeriodicStatus
from tests.e2e.kernel_maps import rule_of
from tests.e2e.node import TRAINING, Agent, Node
from tests.e2e.workloads import until_launching
from tools.harness.containers import Container
from tools.harness.node import simulated_node
from tools.harness.wait import until

CAMERA = ("--period-ms", "50", "--kernels", "20", "--kernel-us", "500", "--seconds", "3600", "--start-now")
RADAR = ("--period-ms", "70", *CAMERA[2:])  # so that each meets the other's requests again and again
REQUESTS = 50  # of each

POLICY = """\
version: 1
enforce: true
periodic:
  - {{name: camera, match: {{cgroup: "*/{token}/camera*"}}, period: 50ms}}
  - {{name: radar, match: {{cgroup: "*/{token}/radar*"}}, period: 70ms, deadline: 60ms}}
offline:
  - name: batch
    match: {{cgroup: "*/{token}/batch*"}}
    ladder: [gate, pace]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """With one GPU."""
    folder = tmp_path_factory.mktemp("deadlines") / "n"
    with simulated_node(folder / "gpu"):
        yield Node(folder)


def tenant(stack: ExitStack, node: Node, name: str, program: str, work: Sequence[str]) -> Container:
    return stack.enter_context(node.tenant(name, "0", program, *work))


def status(agent: Agent, name: str) -> PeriodicStatus | None:
    stance = agent.stance(name)
    return stance.periodic if stance else None


def ended(agent: Agent, name: str) -> int:
    found = status(agent, name)
    return (found.requests_total or 0) if found else 0


def test_two_periodic_containers_take_turns_and_are_reported_and_run_on_without_the_agent(node: Node) -> None:
    with node.agent(POLICY.format(token=node.token)) as agent, ExitStack() as stack:
        camera, radar = tenant(stack, node, "camera", "online", CAMERA), tenant(stack, node, "radar", "online", RADAR)
        until(lambda: min(ended(agent, "camera"), ended(agent, "radar")) > REQUESTS, "requests of both")
        until(lambda: agent.pauses("camera") + agent.pauses("radar") > 0, "one to wait for the other's turn")
        found = status(agent, "radar")
        assert found is not None
        assert (found.period_seconds, found.deadline_seconds) == (0.07, 0.06)
        assert found.load_ratio is not None
        assert found.load_ratio > 0.2  # a fifth of the time is the camera's alone
        counted = [line for line in agent.metrics().splitlines() if "_deadline_requests_total{" in line]
        assert len(counted) == 2
        explained = node.run("explain", "radar", "--run-dir", str(agent.run_dir))
        assert "within 60 ms, one every 70 ms" in " ".join(explained.stdout.split())
        batch = tenant(stack, node, "batch", "offline", TRAINING)
        until(lambda: agent.pauses("batch") > 0, "offline work to give way")
        rule = rule_of(agent.process.pid, batch.tgid)
        assert rule is not None
        assert rule.max_queued_ns == 2_500_000
        agent.process.kill()
        until_launching(node, [camera.tgid, radar.tgid, batch.tgid], node.truth())
