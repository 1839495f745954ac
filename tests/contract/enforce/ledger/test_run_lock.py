# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One run directory, one enforcing agent: real processes, real locks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from agent.node.procfs import Procfs
from enforce.ledger.run_lock import FILE, RunDirLock, closed_first, enforcing_elsewhere, hold_if_unused
from tools.harness.wait import until

PROC = Procfs()
OWNING = """
import subprocess, sys, pathlib
from agent.node.procfs import Procfs
from enforce.ledger.run_lock import RunDirLock
owner = RunDirLock.take(pathlib.Path(sys.argv[1]), Procfs())
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(owner.fd,)) if sys.argv[2] == "guarded" else None
print(child.pid if child else 0, flush=True)
sys.stdin.read()
"""


@contextmanager
def owning(run_dir: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another agent that enforces with the directory, and its guardian's pid."""
    command = [sys.executable, "-c", OWNING, str(run_dir), kind]
    guardian = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            guardian = int(agent.stdout.readline())
            yield agent, guardian
        finally:
            agent.kill()


@contextmanager
def kept_by_a_guardian(run_dir: Path) -> Iterator[Callable[[], None]]:
    """The agent is dead, its guardian is not done yet; what is given ends the guardian."""
    read, write = os.pipe()
    os.set_inheritable(read, True)
    owner = RunDirLock.take(run_dir, PROC)
    dead = subprocess.Popen(["true"])
    dead.wait()
    (run_dir / FILE).write_text(json.dumps({"tgid": dead.pid, "start_ticks": 1}))
    with subprocess.Popen(["cat"], stdin=read, pass_fds=(owner.fd,)) as guardian:
        os.close(read)
        owner.close()
        ends = [write]

        def end() -> None:
            while ends:
                os.close(ends.pop())

        try:
            yield end
        finally:
            end()
            guardian.wait(timeout=60)


def test_while_an_agent_enforces_a_second_one_is_refused_and_the_message_has_the_remedy(tmp_path: Path) -> None:
    with owning(tmp_path, "alone") as (agent, _):
        with pytest.raises(SetupError, match=f"process {agent.pid}.* already enforces .* stop it first"):
            RunDirLock.take(tmp_path, PROC)
        assert enforcing_elsewhere(tmp_path, PROC) == agent.pid
        agent.kill()
        agent.wait(timeout=60)
        assert enforcing_elsewhere(tmp_path, PROC) is None
        RunDirLock.take(tmp_path, PROC).close()


def test_two_run_directories_have_an_owner_each(tmp_path: Path) -> None:
    with owning(tmp_path / "one", "alone"):
        RunDirLock.take(tmp_path / "two", PROC).close()


def test_looking_takes_nothing_away(tmp_path: Path) -> None:
    assert enforcing_elsewhere(tmp_path, PROC) is None
    assert not (tmp_path / FILE).exists()
    owner = RunDirLock.take(tmp_path, PROC)
    assert enforcing_elsewhere(tmp_path, PROC) is None  # it is ourselves
    with pytest.raises(SetupError):
        RunDirLock.take(tmp_path, PROC, timeout_seconds=0)
    owner.close()
    RunDirLock.take(tmp_path, PROC).close()


def test_a_dead_agents_guardian_is_waited_for(tmp_path: Path) -> None:
    with kept_by_a_guardian(tmp_path) as end:
        assert enforcing_elsewhere(tmp_path, PROC) is None
        with pytest.raises(SetupError, match=r"hanging `enforce\.recovery\.guardian`"):
            RunDirLock.take(tmp_path, PROC, timeout_seconds=0.05)
        end()
        RunDirLock.take(tmp_path, PROC, timeout_seconds=60).close()


def test_the_guardian_of_a_killed_agent_keeps_the_directory_until_it_ends(tmp_path: Path) -> None:
    with owning(tmp_path, "guarded") as (agent, guardian):
        try:
            os.kill(guardian, 19)
            until(lambda: PROC.stat(guardian).state == "T", "the guardian to be stopped")
            agent.kill()
            agent.wait(timeout=60)
            with pytest.raises(SetupError, match="guardian"):
                RunDirLock.take(tmp_path, PROC, timeout_seconds=0)
        finally:
            os.kill(guardian, 9)
        RunDirLock.take(tmp_path, PROC, timeout_seconds=60).close()


@pytest.mark.parametrize("content", ["", "{}", "[1]", "nonsense", '{"tgid": "x", "start_ticks": 1}', "\xff" * 300])
def test_whatever_is_in_the_file_only_the_lock_counts(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    RunDirLock.take(tmp_path, PROC).close()


def test_a_run_directory_that_others_write_is_refused_with_the_cure(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with pytest.raises(SetupError, match=f"chmod go-w {run_dir}, or choose another --run-dir"):
        RunDirLock.take(run_dir, PROC)
    run_dir.chmod(0o755)
    RunDirLock.take(run_dir, PROC).close()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(SetupError, match="cannot lock"):
        RunDirLock.take(tmp_path, PROC)
    assert (tmp_path / "victim").read_text() == "precious"


def test_the_lock_lies_above_all_other_descriptors_which_the_kernel_closes_later(tmp_path: Path) -> None:
    owner = RunDirLock.take(tmp_path, PROC)
    try:
        assert owner.fd > max(int(name) for name in os.listdir("/proc/self/fd") if int(name) != owner.fd)
        assert not os.get_inheritable(owner.fd)
        with hold_if_unused(tmp_path) as unused:
            assert not unused
    finally:
        owner.close()
    with hold_if_unused(tmp_path) as unused:
        assert unused


def test_where_no_high_number_is_free_a_descriptor_stays_where_it_is() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fd = os.memfd_create("low")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, limits[1]))
        assert closed_first(fd) == fd
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(fd)
