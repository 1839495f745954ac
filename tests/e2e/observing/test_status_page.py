# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page of a running agent, and a policy file that changes under it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from tests.e2e.node import Agent, Node
from tools.harness.wait import until


def get(agent: Agent, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}{path}", timeout=30) as answer:
        return bytes(answer.read())


def tables(agent: Agent) -> dict[str, list[list[str]]]:
    page: dict[str, Any] = json.loads(get(agent, "/status.json"))
    return {table["title"]: [[cell["text"] for cell in row] for row in table["rows"]] for table in page["tables"]}


def test_it_shows_which_container_is_slowed_for_which_and_why(node: Node, enforcing: Agent) -> None:
    chat, training = node.name("chat"), node.name("training-0")
    until(lambda: any(row[0].endswith(chat) for row in tables(enforcing)["Latency promises"]), "the promise")
    until(lambda: any(row[1] == training for row in tables(enforcing)["Recent decisions"]), "a decision")
    until(lambda: '"graph":{"line":"M' in get(enforcing, "/status.json").decode(), "a graph")
    shown = tables(enforcing)
    (row,) = [row for row in shown["Containers"] if row[0] == training]
    assert row[2] == "offline"
    assert row[8] != "–"  # paused
    assert row[9] != "–"  # why
    assert any(row[1] == training and chat in row[3] for row in shown["Recent decisions"])
    assert b"<title>GPU Warden</title>" in get(enforcing, "/")


def test_a_file_that_breaks_and_is_mended_is_noticed_without_a_signal(node: Node, enforcing: Agent) -> None:
    assert enforcing.policy is not None
    before = len(enforcing.log.read_text())
    right = enforcing.policy.read_text()
    enforcing.policy.write_text(right.replace("law: headroom", "law: none-such"))
    until(lambda: enforcing.snapshot().policy_error, "the mistake to be noticed")
    assert f"{enforcing.policy}:10: " in (enforcing.snapshot().policy_error or "")
    assert "the old one stays in force" in enforcing.log.read_text()[before:]
    assert "gpuwarden_policy_reload_success 0.0" in enforcing.metrics()
    assert enforcing.snapshot().enforcing
    enforcing.policy.unlink()
    until(lambda: "No such file" in (enforcing.snapshot().policy_error or ""), "the loss to be noticed")
    assert enforcing.snapshot().enforcing
    mended = enforcing.policy.with_suffix(".new")
    mended.write_text(node.policy(enforce=False))
    mended.chmod(0o600)
    mended.rename(enforcing.policy)
    until(lambda: not enforcing.snapshot().enforcing, "the new policy")
    until(lambda: enforcing.snapshot().policy_error is None, "the error to be gone")
    assert "gpuwarden_policy_reload_success 1.0" in enforcing.metrics()
