# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Agent and guardian both stand still, or are both killed: the backstop lets every workload run.

As in test_fail_open.py each stop would last ten seconds, or for good.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from enforce.ledger import ledger
from enforce.ledger.run_lock import FILE
from tests.e2e.node import Agent, Node, backstops, guardians, is_gone, state
from tests.e2e.recovery.test_fail_open import released_seconds_after, stopped_seconds_after
from tests.e2e.workloads import Busy, all_stopped, assert_none_stops, until_all_stopped, until_launching
from tools.harness.wait import until

STILL_SECONDS = 1.5  # promised: max_pause + 1 s
KILLED_SECONDS = 0.5
LOCK_SECONDS = 0.3


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


def stop_each(*tgids: int) -> None:
    for tgid in tgids:
        os.kill(tgid, signal.SIGSTOP)


def stop_within_a_pause(both: list[int], tgids: list[int]) -> None:
    """Holds them still at a moment at which they keep every process stopped: a pause may end just before they stop."""

    def held() -> bool:
        stop_each(*both)
        if all_stopped(tgids):
            return True
        for tgid in both:
            os.kill(tgid, signal.SIGCONT)
        return False

    until_all_stopped(tgids)
    until(held, "a moment at which all offline processes are stopped")


def kill_each(*tgids: int) -> None:
    for tgid in tgids:
        os.kill(tgid, signal.SIGKILL)


def test_when_agent_and_guardian_stand_still_every_process_runs_and_when_they_go_on_they_enforce_again(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    both = (enforcing.process.pid, enforcing.guardian())
    name = node.name("training-0")
    until(lambda: enforcing.pauses(name) > 0, "the first pause")
    before = enforcing.stance(name)
    assert before is not None
    with standing_still(*both):
        seconds = stopped_seconds_after(lambda: stop_each(*both), tgids)
        print(f"released after {seconds * 1e3:.0f} ms")
        assert_none_stops(tgids)
        until_launching(node, tgids)
    until_all_stopped(tgids)
    until(lambda: enforcing.pauses(name) > before.pauses_total, "pauses after they went on")
    later = enforcing.stance(name)
    assert later is not None
    assert later.foreign_resumes_total == before.foreign_resumes_total
    assert "agent and guardian stand still: undid 3 of their acts" in enforcing.log.read_text()
    assert seconds <= STILL_SECONDS


def test_a_guardian_that_stands_still_keeps_nothing_stopped_for_longer(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    guardian = enforcing.guardian()
    seconds = stopped_seconds_after(lambda: stop_each(guardian), tgids)
    print(f"released after {seconds * 1e3:.0f} ms")
    until(lambda: is_gone(guardian), "the guardian to be replaced")
    until_all_stopped(tgids)
    assert seconds <= 1.0


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
    until(lambda: enforcing.snapshot().lost.get(key, 0) == before + 2, "the metric")


@pytest.mark.parametrize("first", ["agent", "guardian"])
def test_after_both_are_killed_every_process_runs_within_half_a_second_and_the_lock_is_free(
    first: str, node: Node, busy: Busy, tgids: list[int]
) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir=f"both-{first}") as agent:
        both = [agent.process.pid, agent.guardian()]
        backstop = agent.backstop()
        if first == "guardian":
            both.reverse()
        stop_within_a_pause(both, tgids)  # so that neither can act before it dies
        seconds = released_seconds_after(lambda: kill_each(*both), tgids)
        print(f"released after {seconds * 1e3:.0f} ms")
        until(lambda: is_gone(backstop), "the backstop to end")
        assert guardians(agent.run_dir) == []
        assert_none_stops(tgids)
        until_launching(node, tgids)
        assert ledger.read(agent.run_dir / "ledger.jsonl") == []
        assert seconds <= KILLED_SECONDS


def lock_seconds(run_dir: Path) -> float:
    """How long the lock of the run directory is held from now on."""
    began = time.monotonic()
    with (run_dir / FILE).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return time.monotonic() - began


def test_the_lock_of_agents_that_are_killed_is_free_long_before_their_probes_are_closed(
    node: Node, busy: Busy, tgids: list[int]
) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="lock") as agent:
        guardian, _ = agent.guardian(), agent.backstop()
        until_all_stopped(tgids)
        kill_each(guardian, agent.process.pid)
        seconds = lock_seconds(agent.run_dir)
        print(f"the lock is free after {seconds * 1e3:.0f} ms")
        agent.process.wait(timeout=60)
        assert seconds <= LOCK_SECONDS


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
                assert [state(tgid) for tgid in tgids] == ["T"] * len(tgids)
                assert backstops(later.run_dir) == [later.backstop()]
