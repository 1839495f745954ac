# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whatever dies or hangs, every workload runs on.

The offline processes meet an online side that never rests, so after each stop, which lasts ten seconds, comes another
one: where none comes, everything was released.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from enforce.ledger import ledger
from tests.e2e.node import Agent, Node, is_gone, state
from tests.e2e.workloads import (
    Busy,
    all_stopped,
    assert_none_stops,
    stop_within_a_pause,
    until_all_run,
    until_all_stopped,
    until_launching,
)
from tools.harness.agents import guardians
from tools.harness.wait import until

KILLS = int(os.environ.get("GPUWARDEN_E2E_KILLS", "3"))


@pytest.fixture
def tgids(busy: Busy) -> list[int]:
    """The offline processes, which are stopped most of the time."""
    return [one.tgid for one in busy.training]


@pytest.fixture
def enforcing(node: Node, warden: Agent, busy: Busy) -> Iterator[Agent]:
    """The shared agent, enforcing."""
    warden.reload(node.policy(enforce=True, max_pause="10s"))
    yield warden
    warden.reload(node.policy(enforce=False))


def cut_the_power(agent: Agent, tgids: list[int]) -> None:
    """All of it dies at once, while processes are stopped. It is held still first so that none of it can act."""
    others = [agent.backstop(), agent.guardian()]
    stop_within_a_pause([agent.process.pid, *others], tgids)
    agent.process.kill()
    for other in others:
        os.kill(other, signal.SIGKILL)
    until(lambda: all(map(is_gone, others)), "guardian and backstop to be gone")
    agent.process.wait(timeout=120)
    assert all_stopped(tgids)
    assert {entry.process.tgid for entry in ledger.read(agent.run_dir / "ledger.jsonl") if entry.process} == set(tgids)


@contextmanager
def stopped_by_another_process() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "3600"])
    process.send_signal(signal.SIGSTOP)
    until(lambda: state(process.pid) == "T", "the bystander to be stopped")
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("time_", range(KILLS))
def test_after_the_agent_is_killed_every_stopped_process_runs(time_: int, node: Node, tgids: list[int]) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir=f"killed-{time_}") as agent:
        guardian = agent.guardian()
        until_all_stopped(tgids)
        agent.process.kill()
        until_all_run(tgids)
        assert_none_stops(tgids)
        until(lambda: is_gone(guardian), "the guardian to end")
        until_launching(node, tgids)
        assert ledger.read(agent.run_dir / "ledger.jsonl") == []


def test_after_the_guardian_is_killed_every_process_runs_and_a_new_one_takes_over(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    guardian, logged = enforcing.guardian(), len(enforcing.log.read_text())
    until_all_stopped(tgids)
    launched = node.truth()
    os.kill(guardian, signal.SIGKILL)
    until_launching(node, tgids, launched)
    until(lambda: guardians(enforcing.run_dir) not in ([], [guardian]), "a new guardian")
    assert "released 3 processes, starting it again" in enforcing.log.read_text()[logged:]
    until_all_stopped(tgids)
    assert {entry.process.tgid for entry in ledger.read(enforcing.run_dir / "ledger.jsonl") if entry.process} == set(
        tgids
    )


def test_a_guardian_that_hangs_is_replaced_and_every_process_runs_meanwhile(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    guardian, logged = enforcing.guardian(), len(enforcing.log.read_text())
    until_all_stopped(tgids)
    launched = node.truth()
    os.kill(guardian, signal.SIGSTOP)
    until_launching(node, tgids, launched)
    until(lambda: is_gone(guardian), "the hanging guardian to be killed")
    until(lambda: guardians(enforcing.run_dir), "a new guardian")
    until_all_stopped(tgids)
    written = enforcing.log.read_text()[logged:]
    assert "the guardian hangs" in written
    assert "released 3 processes, starting it again" in written


def test_a_process_that_another_writer_resumes_runs_for_a_while_and_that_is_reported(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    until_all_stopped(tgids)
    before = node.truth()[tgids[0]]
    os.kill(tgids[0], signal.SIGCONT)  # it meets the gate at its next launch; then our agent knows
    until(lambda: node.truth()[tgids[0]] > before + 5, "the process that another program resumed to go on")
    name = node.name("training-0")

    def reported() -> bool:
        stance = enforcing.stance(name)
        return stance is not None and stance.foreign_resumes_total > 0

    until(reported, "the foreign resume to be reported")
    until_all_stopped(tgids)


def test_when_the_agent_hangs_every_process_runs_and_when_it_wakes_it_enforces_again(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    pauses = enforcing.pauses(node.name("training-0"))
    try:
        stop_within_a_pause([enforcing.process.pid], tgids)
        until_all_run(tgids)
        assert_none_stops(tgids)
        until_launching(node, tgids)
    finally:
        enforcing.process.send_signal(signal.SIGCONT)
    until_all_stopped(tgids)
    until(lambda: enforcing.pauses(node.name("training-0")) > pauses, "pauses after waking")
    assert {entry.process.tgid for entry in ledger.read(enforcing.run_dir / "ledger.jsonl") if entry.process} == set(
        tgids
    )


def test_release_resumes_what_a_power_cut_left_stopped_and_nothing_else(node: Node, tgids: list[int]) -> None:
    with (
        node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="cut") as agent,
        stopped_by_another_process() as bystander,
    ):
        cut_the_power(agent, tgids)
        done = node.run("release", "--run-dir", str(agent.run_dir))
        assert (done.returncode, done.stderr) == (0, "")
        assert "3 processes resumed, 3 entries looked at" in done.stdout
        for tgid in tgids:
            assert f"process {tgid}: resumed" in done.stdout
        assert_none_stops(tgids)
        until_launching(node, tgids)
        assert state(bystander) == "T"
        again = node.run("release", "--run-dir", str(agent.run_dir))
        assert (again.returncode, again.stdout) == (0, "0 processes resumed, 0 entries looked at\n")


def test_the_next_start_releases_what_a_power_cut_left_and_its_end_releases_everything(
    node: Node, tgids: list[int]
) -> None:
    with stopped_by_another_process() as bystander:
        with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="restarted") as agent:
            cut_the_power(agent, tgids)
        with node.agent(node.policy(enforce=False), run_dir="restarted") as agent:
            assert "released 3 processes that an earlier agent left" in agent.log.read_text()
            assert_none_stops(tgids)
            until_launching(node, tgids)
            agent.reload(node.policy(enforce=True, max_pause="10s"))
            until_all_stopped(tgids)
            agent.process.terminate()
            until_all_run(tgids)
            assert_none_stops(tgids)
            assert guardians(agent.run_dir) == []
            assert agent.process.wait(timeout=120) == 0
            assert not agent.socket.exists()
            assert ledger.read(agent.run_dir / "ledger.jsonl") == []
            with socket.socket() as connection:
                assert connection.connect_ex(("127.0.0.1", agent.port)) != 0
        assert state(bystander) == "T"
