# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An agent without memory, file descriptors, disk space or its policy file: no process is left stopped."""

from __future__ import annotations

import resource
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from enforce.ledger import ledger
from tests.e2e.node import Agent, Node, is_gone
from tests.e2e.workloads import Busy, assert_none_stops, until_all_stopped, until_launching
from tools.harness.wait import until

MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


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


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own without room; yields the file to remove for some."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "gpuwarden-test", str(folder)], check=True)
    try:
        filler = folder / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        yield filler
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def memory_cgroup(name: str) -> Iterator[Path]:
    """A cgroup v1 in which memory can be short."""
    if not (MEMORY_CGROUPS / "memory.limit_in_bytes").exists():
        pytest.skip("no memory controller of cgroup v1 here")
    cgroup = MEMORY_CGROUPS / name
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        until(lambda: not (cgroup / "cgroup.procs").read_text(), "the cgroup to be empty")
        cgroup.rmdir()


def test_an_agent_without_file_descriptors_leaves_no_process_stopped_and_goes_on_when_it_has_some(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    until_all_stopped(tgids)
    agent = enforcing.process.pid
    before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        until_launching(node, tgids)  # whether it held on or released: each stop ends
        assert enforcing.process.poll() is None
    finally:
        resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
    until_all_stopped(tgids)
    assert {entry.process.tgid for entry in ledger.read(enforcing.run_dir / "ledger.jsonl") if entry.process} == set(
        tgids
    )


def test_without_space_for_its_ledger_none_is_held(node: Node, busy: Busy, tgids: list[int], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(node.policy(enforce=True, max_pause="10s"))
    policy.chmod(0o600)
    run = Path(tempfile.mkdtemp(prefix="full-", dir=node.folder))
    with full_disk(run) as filler, node.agent(None, "--policy", str(policy), run_dir=run.name) as agent:
        assert_none_stops(tgids)
        until(lambda: "ledger" in agent.log.read_text(), "the ledger's trouble to be logged")
        filler.unlink()
        until_all_stopped(tgids)


def test_an_agent_that_the_kernel_kills_for_memory_leaves_no_process_stopped(
    node: Node, busy: Busy, tgids: list[int]
) -> None:
    with (
        memory_cgroup(f"gpuwarden-{node.token}") as cgroup,
        node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="oom") as agent,
    ):
        guardian = agent.guardian()
        until_all_stopped(tgids)
        (cgroup / "memory.swappiness").write_text("0")
        (cgroup / "memory.move_charge_at_immigrate").write_text("0")
        (cgroup / "memory.limit_in_bytes").write_text(str(1 << 20))
        (cgroup / "cgroup.procs").write_text(str(agent.process.pid))  # what it takes from now on is too much soon
        until(lambda: is_gone(agent.process.pid), "the kernel to kill the agent")
        assert agent.process.wait(timeout=60) == -signal.SIGKILL
        assert_none_stops(tgids)
        until_launching(node, tgids)
        until(lambda: is_gone(guardian), "the guardian to end")
        assert ledger.read(agent.run_dir / "ledger.jsonl") == []


def test_a_policy_file_that_is_gone_keeps_the_old_policy_in_force(
    node: Node, enforcing: Agent, tgids: list[int]
) -> None:
    assert enforcing.policy is not None
    text = enforcing.policy.read_text()
    enforcing.policy.unlink()
    try:
        before = len(enforcing.log.read_text())
        enforcing.process.send_signal(signal.SIGHUP)
        until(lambda: "not reloaded" in enforcing.log.read_text()[before:], "the reload to be refused")
        until_all_stopped(tgids)
    finally:
        enforcing.policy.write_text(text)
        enforcing.policy.chmod(0o600)
