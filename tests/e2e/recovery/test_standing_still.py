# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Agent and guardian both stand still, or are both killed: the backstop lets every workload run.

As in test_fail_open.py each stop would last ten seconds, or for good.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.probes.abi import Pace
from enforce.ledger import ledger
from enforce.ledger.run_lock import hold_if_unused
from tests.e2e.kernel_maps import pace_of
from tests.e2e.node import Agent, Node, is_gone
from tests.e2e.workloads import (
    Busy,
    assert_none_stops,
    stop_each,
    stop_within_a_pause,
    until_all_run,
    until_all_stopped,
    until_launching,
)
from tools.harness.agents import backstops, guardians
from tools.harness.wait import until


@pytest.fixture
def tgids(busy: Busy) -> list[int]:
    """The offline processes, which are stopped most of the time."""
    return [one.tgid for one in busy.training]


@pytest.fixture
def enforcing(node: Node, warden: Agent, busy: Busy) -> Iterator[Agent]:
    """The shared agent, enforcing."""
    warden.reload(node.policy(enforce=True, max_pause="10s"))
    warden.backstop()
    yield warden
    warden.reload(node.policy(enforce=False))


@contextmanager
def standing_still(*tgids: int) -> Iterator[None]:
    """Inside the block."""
    try:
        yield
    finally:
        for tgid in tgids:
            with suppress(ProcessLookupError):
                os.kill(tgid, signal.SIGCONT)


def kill_each(*tgids: int) -> None:
    for tgid in tgids:
        os.kill(tgid, signal.SIGKILL)


def paces(agent: Agent, tgids: list[int]) -> list[Pace]:
    """What the kernel counted of each."""
    return [pace_of(agent.process.pid, tgid) or Pace() for tgid in tgids]


def test_when_agent_and_guardian_stand_still_every_process_runs_and_when_they_go_on_they_enforce_again(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    both = [enforcing.process.pid, enforcing.guardian()]
    until_all_stopped(tgids)
    before = paces(enforcing, tgids)
    logged = len(enforcing.log.read_text())
    with standing_still(*both):
        stop_within_a_pause(both, tgids)
        until_all_run(tgids)
        assert_none_stops(tgids)
        until_launching(node, tgids)
    until_all_stopped(tgids)
    later = paces(enforcing, tgids)
    assert all(now.pauses > then.pauses for now, then in zip(later, before, strict=True))
    assert [one.foreign for one in later] == [one.foreign for one in before]
    undone = re.findall(r"stands? still: undid (\d+) of their acts", enforcing.log.read_text()[logged:])
    assert sum(map(int, undone)) == 3  # all at once, or first those of the one that is seen to stand still first


def test_a_guardian_that_stands_still_keeps_nothing_stopped_for_longer(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    guardian, logged = enforcing.guardian(), len(enforcing.log.read_text())
    until_all_stopped(tgids)
    launched = node.truth()
    os.kill(guardian, signal.SIGSTOP)
    until_launching(node, tgids, launched)
    until(lambda: is_gone(guardian), "the guardian to be replaced")
    until_all_stopped(tgids)
    released = r"stands? still: undid \d of their acts|released 3 processes, starting it again"
    assert re.search(released, enforcing.log.read_text()[logged:])


def test_a_backstop_that_is_killed_or_hangs_is_replaced(node: Node, enforcing: Agent) -> None:
    key = "backstop:restarted"
    first = enforcing.backstop()
    before = enforcing.snapshot().lost.get(key, 0)
    os.kill(first, signal.SIGKILL)
    until(lambda: backstops(enforcing.run_dir) not in ([], [first]), "another backstop")
    second = enforcing.backstop()
    time.sleep(1)  # it has begun to look by then: only one that has can be seen to hang soon
    os.kill(second, signal.SIGSTOP)
    until(lambda: backstops(enforcing.run_dir) not in ([], [second]), "another backstop")
    until(lambda: enforcing.snapshot().lost.get(key, 0) >= before + 2, "the metric")


@pytest.mark.parametrize("first", ["agent", "guardian"])
def test_after_both_are_killed_every_process_runs_and_the_lock_is_free(
    first: str, node: Node, busy: Busy, tgids: list[int]
) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir=f"both-{first}") as agent:
        both = [agent.process.pid, agent.guardian()]
        backstop = agent.backstop()
        stop_within_a_pause(both, tgids)  # so that neither can act before it dies
        if first == "guardian":
            both.reverse()
        kill_each(*both)
        until_all_run(tgids)
        until(lambda: is_gone(backstop), "the backstop to end")
        assert guardians(agent.run_dir) == []
        assert_none_stops(tgids)
        until_launching(node, tgids)
        assert ledger.read(agent.run_dir / "ledger.jsonl") == []


def is_lock_free(run_dir: Path) -> bool:
    with hold_if_unused(run_dir) as unused:
        return unused


def test_the_lock_of_agents_that_are_killed_is_free_before_their_probes_are_closed(
    node: Node, busy: Busy, tgids: list[int]
) -> None:
    for time_ in range(3):
        with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir=f"lock-{time_}") as agent:
            guardian, _ = agent.guardian(), agent.backstop()
            until_all_stopped(tgids)
            kill_each(guardian, agent.process.pid)
            until(lambda: is_lock_free(agent.run_dir), "the lock")
            still_closing = agent.process.poll() is None  # until its last thread has closed them
            agent.process.wait(timeout=60)
        if still_closing:
            break  # else this process stalled for the two seconds that closing takes
    else:
        pytest.fail("the lock was never seen to be free before the agent was gone")


def test_a_backstop_that_slept_until_another_agent_enforces_leaves_that_alone(
    node: Node, busy: Busy, tgids: list[int]
) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="next") as agent:
        guardian, backstop = agent.guardian(), agent.backstop()
        until_all_stopped(tgids)
        with standing_still(backstop):
            stop_each(backstop)
            kill_each(guardian, agent.process.pid)
            agent.process.wait(timeout=60)
            with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="next") as later:
                until_all_stopped(tgids)
                os.kill(backstop, signal.SIGCONT)
                until(lambda: is_gone(backstop), "the old backstop to end")
                until_all_stopped(tgids)
                assert [one.foreign for one in paces(later, tgids)] == [0] * len(tgids)
                assert backstops(later.run_dir) == [later.backstop()]
