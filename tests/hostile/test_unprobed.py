# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Work without launches that the probes see: it is named within seconds, and held where the rule says so."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.node import ALWAYS_BUSY, TRAINING, Agent, Node
from tests.hostile.programs import static_library
from tools.harness.wait import until

SEEN_SECONDS = 15.0  # three to four on a machine with nothing else to do
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
        began = time.monotonic()
        until(lambda: unprobed(agent, name) is True, "it to be named")
        assert time.monotonic() - began < SEEN_SECONDS
        until(lambda: unprobed(agent, honest) is False, "its neighbour to be seen as it is")
        metrics = [line for line in agent.metrics().splitlines() if line.startswith("gpuwarden_container_unprobed{")]
        assert {line.split('container="')[1].split('"')[0]: line[-3:] for line in metrics} == {
            name: "1.0",
            honest: "0.0",
        }
        until(lambda: f"{name}: unprobed" in agent.log.read_text(), "the log to say so")
        before = launches(node, "training-static")
        time.sleep(1)
        assert launches(node, "training-static") > before  # reported, not held


def test_where_the_rule_says_freeze_it_is_frozen_only_while_an_online_container_needs_the_gpu(
    node: Node, static: Path
) -> None:
    def rungs() -> tuple[str, ...]:
        status = agent.stance(name)
        return status.rungs if status else ()

    with (
        node.agent(POLICY.format(token=node.token, unprobed="freeze")) as agent,
        working(node, "training-static", static) as name,
    ):
        until(lambda: unprobed(agent, name) is True, "it to be named")
        assert "freeze" not in rungs()
        with working(node, "chat", "online", ALWAYS_BUSY):
            until(lambda: "freeze" in rungs(), "it to be frozen")
            first, began = launches(node, "training-static"), time.monotonic()
            time.sleep(5)
            rate = (launches(node, "training-static") - first) / (time.monotonic() - began)
            assert unprobed(agent, name) is True  # idleness is no evidence
        until(lambda: "freeze" not in rungs(), "it to be thawed when no service needs the GPU")
        first, began = launches(node, "training-static"), time.monotonic()
        time.sleep(3)
        assert rate < 0.2 * (launches(node, "training-static") - first) / (time.monotonic() - began)
