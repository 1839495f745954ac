# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`explain` asks an agent that enforces; `plan` and a second agent beside it undo nothing of what it holds."""

from __future__ import annotations

import json
from typing import Any

from enforce.ledger import ledger
from enforce.ledger.run_lock import FILE
from tests.e2e.kernel_maps import rule_of
from tests.e2e.node import Agent, Node
from tests.e2e.workloads import Busy
from tools.harness.wait import until


def story_of(node: Node, agent: Agent, name: str) -> dict[str, Any]:
    done = node.run("explain", node.name(name), "--json", "--run-dir", str(agent.run_dir))
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout)["story"]
    assert isinstance(story, dict)
    return story


def paused_seconds(story: dict[str, Any]) -> float:
    return float(sum(one["paused_seconds"] for one in story["intervals"]))


def complaints(agent: Agent) -> list[str]:
    """What it logged of decisions that failed and of guardians. Other lines may come at any time."""
    return [line for line in agent.log.read_text().split("\n") if "guardian" in line or "decision" in line]


def test_explain_shows_which_container_was_slowed_for_which_and_how_much(
    node: Node, enforcing: Agent, busy: Busy
) -> None:
    until(lambda: paused_seconds(story_of(node, enforcing, "training-0")) > 0, "stops in the story", step_seconds=0.5)
    story = story_of(node, enforcing, "training-0")
    latest = story["intervals"][-1]
    assert latest["acted"]
    assert latest["means"] == ["gate", "pace"]
    assert [whom["name"] for whom in latest["whom"].values()] == [node.name("chat")]
    assert story_of(node, enforcing, "chat")["kept"]
    assert node.name("training-0") in {one["name"] for one in story_of(node, enforcing, "chat")["slowed"]}
    done = node.run("explain", node.name("training-0"), "--run-dir", str(enforcing.run_dir))
    assert f"{node.name('chat')} on GPU-" in done.stdout
    assert "rule training, law headroom" in done.stdout
    assert max(map(len, done.stdout.split("\n"))) <= 80
    from_log = node.run("explain", node.name("training-0"), "--decisions", str(enforcing.decisions))
    assert f"{node.name('chat')} on GPU-" in from_log.stdout
    unknown = node.run("explain", "none-such", "--run-dir", str(enforcing.run_dir))
    assert unknown.returncode == 1
    assert f"offline   {node.name('training-0')}" in unknown.stderr


def test_a_plan_beside_an_agent_that_enforces_undoes_nothing_of_what_it_holds(
    node: Node, enforcing: Agent, busy: Busy
) -> None:
    guardian, socket = enforcing.guardian(), enforcing.socket.stat().st_ino
    owner = (enforcing.run_dir / FILE).read_bytes()
    before = complaints(enforcing)
    plan = ("plan", "--policy", str(enforcing.policy), "--seconds", "3", "--json")
    done = node.run(*plan)
    assert done.returncode == 0, done.stderr
    lines = {line["container"]: line for line in map(json.loads, done.stdout.splitlines())}
    planned = lines[node.name("training-0")]
    assert (planned["role"], planned["rule"]) == ("offline", "training")
    assert planned["decision"]["acted"] is False
    assert planned["decision"]["ruler_name"] == node.name("chat")
    assert planned["ladder"] == {"gate": None, "pace": None}
    assert lines[node.name("chat")]["role"] == "online"
    held = {entry.process.tgid for entry in ledger.read(enforcing.run_dir / "ledger.jsonl") if entry.process}
    assert held == {one.tgid for one in busy.training}
    assert all(rule_of(enforcing.process.pid, one.tgid) is not None for one in busy.training)
    assert (enforcing.guardian(), enforcing.socket.stat().st_ino) == (guardian, socket)
    assert (enforcing.run_dir / FILE).read_bytes() == owner
    assert complaints(enforcing) == before
    pauses = enforcing.pauses(node.name("training-0"))
    until(lambda: enforcing.pauses(node.name("training-0")) > pauses, "pauses that go on")
