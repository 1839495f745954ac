# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent as a process, real containers: which are slowed, which never are, and that only `enforce: true` does it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from agent.probes.abi import ROLE_OFFLINE, ROLE_ONLINE
from enforce.ledger import ledger
from tests.e2e.kernel_maps import pace_of, rule_of
from tests.e2e.node import Agent, Node, state
from tests.e2e.workloads import Busy, until_all_run
from tools.harness.agents import guardians
from tools.harness.wait import until

WATCHED_SECONDS = 1.5


@pytest.fixture
def deciding(node: Node, warden: Agent, busy: Busy) -> Agent:
    """The shared agent with `enforce: false`."""
    warden.reload(node.policy(enforce=False))
    return warden


def states_of(tgid: int) -> set[str]:
    """Of all threads."""
    return {state(int(task.name)) for task in Path(f"/proc/{tgid}/task").iterdir()}


def seen(tgids: list[int], seconds: float = WATCHED_SECONDS) -> dict[int, set[str]]:
    """Every state that each process's threads were in during this time."""
    found: dict[int, set[str]] = {tgid: set() for tgid in tgids}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for tgid in tgids:
            found[tgid] |= states_of(tgid)
        time.sleep(0.001)
    return found


def lines(agent: Agent, after: int = 0) -> list[dict[str, Any]]:
    """The decisions that are whole; each must be JSON. What they brought is logged in lines of another kind."""
    text = agent.decisions.read_bytes()[after:]
    return [line for line in map(json.loads, text.split(b"\n")[:-1]) if line["kind"] == "decision"]


def test_with_enforce_false_it_decides_and_logs_but_touches_no_process(node: Node, deciding: Agent, busy: Busy) -> None:
    before = deciding.decisions.stat().st_size
    deciding.reload(node.policy(enforce=False))
    until(lambda: lines(deciding, before), "a decision")
    assert all(line["acted"] is False for line in lines(deciding, before))
    pauses = deciding.pauses(node.name("training-0"))
    tgids = [busy.chat.tgid, busy.stranger.tgid, *(one.tgid for one in busy.training)]
    assert not any("T" in states for states in seen(tgids).values())
    assert [rule_of(deciding.process.pid, tgid) for tgid in tgids] == [None] * 5
    assert ledger.read(deciding.run_dir / "ledger.jsonl") == []
    assert guardians(deciding.run_dir) == []
    assert deciding.pauses(node.name("training-0")) == pauses
    assert not deciding.snapshot().enforcing


def test_the_offline_containers_are_paused_and_each_hold_is_in_the_ledger(
    node: Node, enforcing: Agent, busy: Busy
) -> None:
    before = [enforcing.pauses(node.name(f"training-{n}")) for n in range(3)]
    until(
        lambda: all(enforcing.pauses(node.name(f"training-{n}")) > before[n] for n in range(3)),
        "pauses of all offline containers to grow",
    )
    for one in busy.training:
        until(lambda: "T" in states_of(one.tgid), "it to be stopped", step_seconds=0.001)  # noqa: B023
        rule = rule_of(enforcing.process.pid, one.tgid)
        assert rule is not None
        assert rule.role == ROLE_OFFLINE
    held = {entry.process.tgid for entry in ledger.read(enforcing.run_dir / "ledger.jsonl") if entry.process}
    assert held == {one.tgid for one in busy.training}
    assert enforcing.snapshot().enforcing


def test_the_online_process_is_never_stopped_nor_even_charged(node: Node, enforcing: Agent, busy: Busy) -> None:
    assert "T" not in seen([busy.chat.tgid])[busy.chat.tgid]
    assert pace_of(enforcing.process.pid, busy.chat.tgid) is None
    offline = pace_of(enforcing.process.pid, busy.training[0].tgid)
    assert offline is not None
    assert offline.pauses > 0
    rule = rule_of(enforcing.process.pid, busy.chat.tgid)
    assert rule is not None
    assert (rule.role, rule.flags) == (ROLE_ONLINE, 0)
    stance = enforcing.stance(node.name("chat"))
    assert stance is not None
    assert (stance.role, stance.pauses_total) == ("online", 0)


def test_a_container_that_the_policy_does_not_name_is_never_touched(node: Node, enforcing: Agent, busy: Busy) -> None:
    launches = node.truth()[busy.stranger.tgid]
    assert "T" not in seen([busy.stranger.tgid])[busy.stranger.tgid]
    assert rule_of(enforcing.process.pid, busy.stranger.tgid) is None
    assert pace_of(enforcing.process.pid, busy.stranger.tgid) is None
    until(lambda: node.truth()[busy.stranger.tgid] > launches, "launches of the unnamed container")


def test_every_decision_is_a_line_of_json_with_its_reason(node: Node, warden: Agent, busy: Busy) -> None:
    warden.reload(node.policy(enforce=True))
    before = warden.decisions.stat().st_size
    until(lambda: any(line["latency_ns"] for line in lines(warden, before)), "a decision with a latency")
    names = {"0", "1", "2"}
    until(lambda: {line["container"][-1] for line in lines(warden, before)} >= names, "decisions about all of them")
    taken = lines(warden, before)
    for line in taken:
        assert line["acted"] is True
        assert line["reason"]
        assert "\n" not in line["reason"]
        assert (line["rule"], line["law"], line["target_ns"]) == ("training", "headroom", 400_000_000)
        assert line["container"].startswith(f"runc:/gpuwarden-e2e/training-{node.token}-")
        assert 0 < line["share_after"] <= 1
    assert {line["container"][-1] for line in taken} == names


def test_sighup_from_false_to_true_holds_and_back_to_false_releases(node: Node, deciding: Agent, busy: Busy) -> None:
    tgids = [one.tgid for one in busy.training]
    deciding.reload(node.policy(enforce=True, max_pause="10s"))
    until(lambda: all(state(tgid) == "T" for tgid in tgids), "all offline processes to be stopped", step_seconds=0.001)
    deciding.reload(node.policy(enforce=False))
    until_all_run(tgids)
    assert not any("T" in states for states in seen(tgids).values())
    assert [rule_of(deciding.process.pid, tgid) for tgid in (busy.chat.tgid, *tgids)] == [None] * 4
    assert ledger.read(deciding.run_dir / "ledger.jsonl") == []
    assert guardians(deciding.run_dir) == []


def test_a_wrong_policy_at_sighup_keeps_the_old_one_in_force(node: Node, enforcing: Agent, busy: Busy) -> None:
    guardian = enforcing.guardian()
    wrong = node.policy(enforce=False).replace("law: headroom", "law: none-such")
    message = enforcing.reload(wrong)
    assert "the old one stays in force" in message
    assert f"{enforcing.policy}:10: " in message
    assert "Traceback" not in message
    pauses = enforcing.pauses(node.name("training-0"))
    until(lambda: enforcing.pauses(node.name("training-0")) > pauses, "pauses under the old policy")
    assert guardians(enforcing.run_dir) == [guardian]
    assert enforcing.snapshot().enforcing
