# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An agent that is started anew knows what the one before knew of what runs: graphs, devices, functions' names."""

from __future__ import annotations

from agent.core.model import Snapshot
from tests.e2e.node import ISOLATED, Agent, Node
from tools.harness.wait import until

KERNELS = 7  # of each graph
GRAPHS = ("--kernels", "2", "--graph", str(KERNELS), "--kernel-us", "200", "--seconds", "3600")
PLAIN = ("--kernels", "20", "--kernel-us", "200", "--seconds", "3600")


def kernels(agent: Agent, name: str) -> int:
    """Of a container since the agent first saw it, on its only device."""
    row = agent.container(name)
    return sum(usage.totals.launches for usage in row.usage) if row else 0


def functions(agent: Agent, name: str) -> set[str]:
    """The names of a container's functions."""
    row = agent.container(name)
    return {function.name for function in row.functions} if row else set()


def unknown(snapshot: Snapshot) -> dict[str, int]:
    """What the agent could not tell of launches."""
    return {key: count for key, count in snapshot.lost.items() if count and key in ("map:graph", "launches:no_device")}


def test_after_a_restart_the_graphs_devices_and_names_of_what_runs_are_known(node: Node) -> None:
    both = node.name("graphs"), node.name("plain")
    with (
        node.agent(None, run_dir="restarts", module=ISOLATED) as agent,
        node.container("graphs", "offline", GRAPHS),
        node.container("plain", "offline", PLAIN),
    ):
        until(lambda: all(kernels(agent, name) for name in both), "launches of both")
        until(lambda: functions(agent, both[1]) - {""}, "the name of a function")
        names = functions(agent, both[1]) - {""}
        assert unknown(agent.snapshot()) == {}
        agent.process.terminate()
        agent.process.wait(timeout=60)
        with node.agent(None, run_dir="restarts", module=ISOLATED) as later:
            until(lambda: all(kernels(later, name) > 10 * KERNELS for name in both), "launches of both")
            assert kernels(later, both[0]) % KERNELS == 0
            until(lambda: functions(later, both[1]) == names, "its functions, by name")
            assert unknown(later.snapshot()) == {}, later.log.read_text()
            assert "running processes are known from before" in later.log.read_text()
