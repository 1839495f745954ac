# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs on libraries that no one here wrote are attributed, gated and paced, and run on when the agent ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.model import FunctionUsage, Usage
from agent.probes.abi import RULE_PACE, Pace
from tests.e2e.kernel_maps import pace_of, rule_of
from tests.e2e.node import ALWAYS_BUSY, Agent, Node
from tests.e2e.workloads import assert_none_stops, until_launching
from tests.support import frameworks
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

STEPS = 20
NAMES = ("numba", "cuda-python-ptx", "cuda-python-cubin")
ONLINE = ("--rate", "5", "--kernels", "1", "--kernel-us", "100", "--seconds", "3600", "--start-now")
SHARE = 0.5
BLOCK_NS = 250_000  # a launch of 4,096 blocks of 256 threads is four waves of the simulated GPU: 1 ms

POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}*"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    law: fixed
    share: {share}
    limits: {{max_pause: 200ms, floor: 0%}}
    ladder: [{rung}]
"""


def policy(node: Node, rung: str) -> str:
    """At the gate all of the time that the online container leaves; paced, SHARE of it."""
    share = SHARE if rung == "pace" else 1.0
    return POLICY.format(token=node.token, share=share, rung=rung)


@dataclass(frozen=True, slots=True)
class Program:
    """A source, and the images that it is given beside the number of steps."""

    source: str
    images: tuple[Path, ...] = ()

    def start(self, node: Node, name: str, steps: int) -> Container:
        """In a container; 0 steps: without end."""
        shown = node.name(name)
        command = [frameworks.PYTHON, frameworks.PROGRAMS / self.source, steps, *self.images]
        needed = {BUILD, frameworks.FETCHED, frameworks.PROGRAMS, *(image.parent for image in self.images)}
        return Container.start(
            shown,
            [str(word) for word in command],
            {**node.stage.environment, "GPUSIM_BLOCK_NS": str(BLOCK_NS)},
            cgroup_path=f"/gpuwarden-e2e/{shown}",
            mounts=[*map(Mount, sorted({*needed, Path(sys.base_prefix)})), Mount(node.folder, read_only=False)],
            state=node.folder / "containers",
        )


@pytest.fixture(params=NAMES)
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    frameworks.skip_without()
    if request.param == "numba":
        return Program("numba_axpy.py")
    if request.param == "cuda-python-ptx":
        return Program("cuda_python_axpy.py", (frameworks.AXPY,))
    return Program("cuda_python_axpy.py", (frameworks.cubin(frameworks.AXPY, tmp_path / "axpy.cubin"),))


def usage_of(agent: Agent, name: str) -> Usage | None:
    """On the one device."""
    row = agent.container(name)
    return row.usage[0] if row and row.usage else None


def functions_of(agent: Agent, name: str) -> tuple[FunctionUsage, ...]:
    row = agent.container(name)
    return row.functions if row else ()


def test_launches_copies_and_memory_are_those_of_the_program(node: Node, warden: Agent, program: Program) -> None:
    warden.reload(node.policy(enforce=False))
    name = f"training-counted{time.monotonic_ns()}"
    with program.start(node, name, STEPS) as container:
        assert container.stdout
        line = container.stdout.readline()
        assert line, container.errors()
        done = json.loads(line)

        def launches() -> int:
            usage = usage_of(warden, node.name(name))
            return usage.totals.launches if usage else 0

        until(lambda: launches() >= done["launches"], "as many launches as the program made")
        usage = usage_of(warden, node.name(name))
        assert usage
        assert node.truth()[container.tgid] == done["launches"] == usage.totals.launches
        assert (usage.totals.pcie_rx_bytes, usage.totals.pcie_tx_bytes) == (done["to_device"], done["to_host"])
        assert {kind: amount for kind, amount in usage.memory_by_kind.items() if amount} == {"plain": done["memory"]}


def test_the_kernel_has_the_name_that_the_image_gives_it(node: Node, warden: Agent, program: Program) -> None:
    warden.reload(node.policy(enforce=False))
    with program.start(node, "training-named", steps=0):
        until(lambda: functions_of(warden, node.name("training-named")), "its functions")
        (function,) = functions_of(warden, node.name("training-named"))
        assert "axpy" in function.name  # numba's names have its types too
        until(
            lambda: any(one.gpu_seconds_per_launch for one in functions_of(warden, node.name("training-named"))),
            "the time of a launch",
        )


def test_it_is_stopped_at_the_gate_and_goes_on_behind_it(node: Node, warden: Agent, program: Program) -> None:
    name = node.name("training-gated")
    with (
        node.container("chat-gate", "online", ALWAYS_BUSY),
        program.start(node, "training-gated", steps=0) as container,
    ):
        until(lambda: node.truth().get(container.tgid), "launches")
        warden.reload(policy(node, "gate"))
        until(lambda: warden.pauses(name) > 0, "a pause")
        warden.reload(node.policy(enforce=False))
        before = node.truth()[container.tgid]
        until(lambda: node.truth()[container.tgid] > before, "launches after the pause")
        assert container.alive(), container.errors()


def test_it_is_held_at_its_share_and_runs_on_unheld_when_the_agent_ends(node: Node, program: Program) -> None:
    with (
        node.container("chat-share", "online", ONLINE),
        program.start(node, "training-share", steps=0) as container,
    ):
        until(lambda: node.truth().get(container.tgid), "launches")
        with node.agent(policy(node, "pace"), run_dir="sharing") as agent:

            def pace() -> Pace:
                return pace_of(agent.process.pid, container.tgid) or Pace()

            until(lambda: pace().pauses, "the first pause")
            rule = rule_of(agent.process.pid, container.tgid)
            assert rule is not None
            assert (rule.flags, rule.rate_ppm) == (RULE_PACE, SHARE * 1_000_000)
            pauses, charged_ns, launches = pace().pauses, pace().charged_ns, node.truth()[container.tgid]
            until(lambda: node.truth()[container.tgid] > launches + STEPS, "launches between the pauses")
            until(lambda: pace().pauses > pauses and pace().charged_ns > charged_ns, "more pauses for what it launches")
        assert_none_stops([container.tgid])
        until_launching(node, [container.tgid])
        assert container.alive(), container.errors()
