# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that do to idle streams what would hide their work: they are counted, and held as any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.node import ALWAYS_BUSY, Agent, Node
from tests.hostile.programs import gpu_program
from tools.harness.wait import until


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, node: Node) -> Path:
    """The program, where containers have it."""
    made = gpu_program("idle_streams", tmp_path_factory.mktemp("streams"))
    return Path(shutil.copy(made, node.folder / made.name))


def counted(agent: Agent, name: str) -> int:
    """Its launches, while it lives and afterwards."""
    snapshot = agent.snapshot()
    rows = [row for row in (*snapshot.containers, *snapshot.ended) if row.container.name == name]
    return max((sum(usage.totals.launches for usage in row.usage) for row in rows), default=0)


@pytest.mark.parametrize("how", ["waits", "captures"])
def test_what_is_done_to_idle_streams_hides_no_launch_and_ends_no_hold(node: Node, program: Path, how: str) -> None:
    with (
        node.agent(node.policy(enforce=True, max_pause="100ms"), run_dir=how) as agent,
        node.container("chat", "online", ALWAYS_BUSY),
        node.container(f"training-{how}", str(program), (how,)) as training,
    ):
        until(lambda: agent.pauses(training.name) > 5, "it to be held")
        pauses = agent.pauses(training.name)
        until(lambda: agent.pauses(training.name) > pauses + 5, "it to be held on")
        training.stop()
        truth = node.truth()[training.tgid]
        until(lambda: counted(agent, training.name) >= truth, f"{truth} launches")
        assert (
            counted(agent, training.name) <= truth + 1
        )  # one more: it ended where it was held, before that launch ran
