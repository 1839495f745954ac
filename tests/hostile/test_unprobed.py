# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Work without launches that the probes see: it is named, and held where the rule says so."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node
from tests.hostile.programs import gpu_program, static_library
from tests.support.groups import roots
from tools.harness.wait import until

POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    limits: {{max_pause: 500ms, floor: 0%}}
    ladder: [gate, pace]
    unprobed: {unprobed}
"""


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory, node: Node) -> Path:
    """The program with the driver library in it, where containers have it."""
    made = static_library(tmp_path_factory.mktemp("static"))
    linked = subprocess.run(["readelf", "--dynamic", str(made)], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in linked
    return Path(shutil.copy(made, node.folder / made.name))


@contextmanager
def working(node: Node, name: str, program: Path | str, arguments: tuple[str, ...] = ()) -> Iterator[str]:
    """A container that runs it; its name."""
    with node.container(name, str(program), arguments):
        yield node.name(name)


@contextmanager
def frozen_of(name: str) -> Iterator[Cgroup]:
    """A container's freezer, in the hierarchy that the agent uses too."""
    version, root = next((version, roots()[version]) for version in (2, 1) if version in roots())
    with Cgroup(FreezerCgroup.of(version, f"{root}/gpuwarden-e2e/{name}")) as group:
        yield group


def unprobed(agent: Agent, name: str) -> bool | None:
    row = agent.container(name)
    return next(iter(row.unprobed.values()), None) if row else None


def launches(node: Node, name: str) -> int:
    """What the program says that it has launched."""
    lines = (node.folder / f"{node.name(name)}.out").read_text().split()
    return int(lines[-1]) if lines else 0


def test_a_container_with_the_driver_library_linked_in_is_named_and_its_neighbour_is_not(
    node: Node, static: Path
) -> None:
    with (
        node.agent(POLICY.format(token=node.token, unprobed="report")) as agent,
        working(node, "training-honest", "offline", TRAINING) as honest,
        working(node, "training-static", static) as name,
    ):
        until(lambda: launches(node, "training-static") > 0, "it to work")
        until(lambda: unprobed(agent, name) is True, "it to be named")
        until(lambda: unprobed(agent, honest) is False, "its neighbour to be seen as it is")
        metrics = [line for line in agent.metrics().splitlines() if line.startswith("gpuwarden_container_unprobed{")]
        assert {line.split('container="')[1].split('"')[0]: line[-3:] for line in metrics} == {
            name: "1.0",
            honest: "0.0",
        }
        until(lambda: f"{name}: unprobed" in agent.log.read_text(), "the log to say so")
        before = launches(node, "training-static")
        until(lambda: launches(node, "training-static") > before, "its launches: it is reported, not held")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the exports of the simulated libcuda are stubs on x86-64")
def test_a_container_that_launches_behind_the_exports_is_named(
    node: Node, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = shutil.copy(gpu_program("past_stubs", tmp_path_factory.mktemp("past")), node.folder / "past_stubs")
    with (
        node.agent(POLICY.format(token=node.token, unprobed="report")) as agent,
        working(node, "training-behind", program) as name,
    ):
        until(lambda: launches(node, "training-behind") > 0, "it to work")
        until(lambda: unprobed(agent, name) is True, "it to be named")


def test_where_the_rule_says_freeze_it_is_frozen_only_while_an_online_container_needs_the_gpu(
    node: Node, static: Path
) -> None:
    def rungs() -> tuple[str, ...]:
        status = agent.stance(name)
        return status.rungs if status else ()

    with (
        node.agent(POLICY.format(token=node.token, unprobed="freeze")) as agent,
        working(node, "training-static", static) as name,
        frozen_of(name) as group,
    ):
        until(lambda: unprobed(agent, name) is True, "it to be named")
        assert "freeze" not in rungs()
        assert not group.is_asked()
        with working(node, "chat", "online", ALWAYS_BUSY):
            until(lambda: "freeze" in rungs(), "it to be frozen")
            for _ in range(5):
                until(group.is_frozen, "a turn to freeze", step_seconds=0.005)
                time.sleep(1)
            assert unprobed(agent, name) is True  # idleness is no evidence
        until(lambda: "freeze" not in rungs(), "it to be thawed when no service needs the GPU")
        assert not group.is_asked()
        first = launches(node, "training-static")
        until(lambda: launches(node, "training-static") > first, "its launches")
        assert not group.is_asked()
