# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A target that cannot be met, and a ladder with `freeze`: the agent climbs it; if any process dies, all others run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup
from enforce.ledger import ledger
from tests.e2e.node import TRAINING, Agent, Node, is_gone
from tests.e2e.workloads import stop_each
from tests.support.groups import roots
from tools.harness.agents import guardians
from tools.harness.containers import Container
from tools.harness.wait import until

SERVING = ("--rate", "50", "--kernels", "4", "--kernel-us", "500", "--seconds", "3600", "--start-now")


@dataclass(frozen=True, slots=True)
class Busy:
    """Requests that never keep their target, whatever is done to the offline containers."""

    training: tuple[Container, ...]


@pytest.fixture
def busy(node: Node) -> Iterator[Busy]:
    """An online container and two offline ones."""
    with (
        node.container("chat", "online", SERVING),
        node.container("training-0", "offline", TRAINING) as one,
        node.container("training-1", "offline", TRAINING) as other,
    ):
        yield Busy((one, other))


def policy(node: Node) -> str:
    """Turns of a second each way."""
    text = node.policy(enforce=True, max_pause="1s").replace("target: 400ms", "target: 1ms")
    return text.replace("floor: 0%", "floor: 50%").replace("[gate, pace]", "[gate, pace, freeze]")


def cgroups(busy: Busy) -> list[Cgroup]:
    """Those of the offline containers that are frozen, in the hierarchy that the agent uses too."""
    version, root = next((version, roots()[version]) for version in (2, 1) if version in roots())
    return [Cgroup(FreezerCgroup.of(version, f"{root}{one.cgroup_path}")) for one in busy.training]


def test_it_freezes_in_the_end_and_after_the_agent_is_killed_every_process_runs(node: Node, busy: Busy) -> None:
    with node.agent(policy(node), run_dir="frozen") as agent:
        groups = cgroups(busy)
        until(
            lambda: all(group.is_frozen() for group in groups),
            "all offline containers to be frozen",
            step_seconds=0.005,
        )
        guardian = agent.guardian()
        until(lambda: acts(agent) == {"pace", "freeze"}, "a turn to freeze in the ledger", step_seconds=0.005)
        until(lambda: not any(group.is_asked() for group in groups), "the turn to thaw", step_seconds=0.005)
        hang(agent, groups)
        until(lambda: reports_frozen(agent, node), "the agent to say so")
        stop_while_frozen(agent, groups)
        agent.process.kill()
        until(lambda: not any(group.is_asked() for group in groups), "the guardian to thaw")
        until(lambda: is_gone(guardian), "the guardian to end")
        assert guardians(agent.run_dir) == []
        assert ledger.read(agent.run_dir / "ledger.jsonl") == []
        before = node.truth()
        until(
            lambda: all(node.truth()[one.tgid] > before[one.tgid] for one in busy.training), "all processes' launches"
        )
        assert not any(group.is_asked() for group in groups)


def acts(agent: Agent) -> set[str]:
    return {entry.act for entry in ledger.read(agent.run_dir / "ledger.jsonl")}


def stop_while_frozen(agent: Agent, groups: list[Cgroup]) -> None:
    """The agent stands still, and has not ended the turn just before."""

    def held() -> bool:
        stop_each(agent.process.pid)
        if all(group.is_frozen() for group in groups):
            return True
        agent.process.send_signal(signal.SIGCONT)
        return False

    until(held, "the turn to freeze")


def hang(agent: Agent, groups: list[Cgroup]) -> None:
    """An agent that hangs while all are frozen: the guardian thaws them, and leaves it the entries."""
    try:
        stop_while_frozen(agent, groups)
        until(lambda: not any(group.is_asked() for group in groups), "the guardian to thaw", step_seconds=0.005)
        assert acts(agent) == {"pace", "freeze"}
    finally:
        agent.process.send_signal(signal.SIGCONT)


def reports_frozen(agent: Agent, node: Node) -> bool:
    stance = agent.stance(node.name("training-0"))
    return stance is not None and "freeze" in stance.rungs
