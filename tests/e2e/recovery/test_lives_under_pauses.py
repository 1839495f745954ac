# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A paused process may fork, exec and be debugged, and clocks may be stepped: every process runs on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agent.core.model import EnforcementStatus
from tests.e2e.node import Agent, Node, is_gone, state
from tests.e2e.workloads import Busy, assert_none_stops, until_launching
from tests.support.programs.driver import compile_driver
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

LAUNCHES = "3*launch:1x1x1:32x1x1:0:200000"
BY_A_THREAD, BY_THE_LEADER = ("threads=1", LAUNCHES, "fork", "exec"), ("threads=0", LAUNCHES, "fork", "exec")
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
DAY = 86_400
CLOCK = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now)
{
	long failed = syscall(SYS_clock_gettime, id, now), seconds = 0;
	FILE *file = id == CLOCK_REALTIME ? fopen(getenv("CLOCK_STEP"), "r") : NULL;
	if (file) {
		if (fscanf(file, "%ld", &seconds) != 1)
			seconds = 0;
		fclose(file);
	}
	now->tv_sec += seconds;
	return failed;
}
"""


@pytest.fixture
def tgids(busy: Busy) -> list[int]:
    """The offline processes."""
    return [one.tgid for one in busy.training]


class Lives:
    """A container whose one process execs program after program; each prints "ready" and waits for its command."""

    def __init__(self, container: Container) -> None:
        self.container, self.begun = container, 0
        threading.Thread(target=self._lead, daemon=True).start()

    def _lead(self) -> None:
        assert self.container.stdout
        with suppress(OSError, ValueError):  # until the container is stopped
            for line in self.container.stdout:
                if line.startswith("ready"):
                    self.begun += 1
                    self.container.stdin.write("go\n")
                    self.container.stdin.flush()


@contextmanager
def lives(node: Node) -> Iterator[Lives]:
    """Many, each with launches, a child, and the next one at its end."""
    compile_driver(node.folder)
    name = node.name("training-lives")
    with Container.start(
        name,
        [str(node.folder / "driver"), *(BY_A_THREAD + BY_THE_LEADER) * 200],
        node.stage.environment,
        cgroup_path=f"/gpuwarden-e2e/{name}",
        mounts=[Mount(BUILD), Mount(node.folder, read_only=False)],
        state=node.folder / "containers",
    ) as container:
        yield Lives(container)


def test_a_process_that_forks_and_becomes_other_programs_is_paused_and_left_running(node: Node, busy: Busy) -> None:
    with (
        node.agent(node.policy(enforce=True, max_pause="100ms"), run_dir="lives") as agent,
        lives(node) as program,
    ):
        seen: list[EnforcementStatus] = []

        def stopped_often() -> bool:
            seen.extend(stance for stance in [agent.stance(node.name("training-lives"))] if stance)
            return program.begun >= 4 and bool(seen) and seen[-1].pauses_total > 3

        until(stopped_often, "stops of one program after the other")
        assert all(stance.foreign_resumes_total == 0 for stance in seen)
        until(lambda: state(program.container.tgid) == "T", "it to be stopped", step_seconds=0.001)
        agent.process.kill()
        begun = program.begun
        until(lambda: program.begun > begun + 3, "it to go on as other programs, each after its child ended")
        assert_none_stops([program.container.tgid])


@contextmanager
def debugged(tgid: int) -> Iterator[None]:
    """Held by a debugger."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(PTRACE_SEIZE, tgid, None, None) != 0:
        pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
    assert libc.ptrace(PTRACE_INTERRUPT, tgid, None, None) == 0
    os.waitpid(tgid, os.WUNTRACED)
    assert state(tgid) == "t"
    try:
        yield
    finally:
        assert libc.ptrace(PTRACE_DETACH, tgid, None, None) == 0


def test_a_process_that_is_debugged_while_it_is_stopped_runs_on_after_that_though_the_agent_died(
    node: Node, busy: Busy, tgids: list[int]
) -> None:
    with node.agent(node.policy(enforce=True, max_pause="10s"), run_dir="debugged") as agent:
        until(lambda: state(tgids[0]) == "T", "it to be stopped", step_seconds=0.001)
        with debugged(tgids[0]):
            agent.process.kill()
            until_launching(node, tgids[1:])
            assert state(tgids[0]) == "t"  # the debugger's, which decides
        until_launching(node, tgids)
        assert_none_stops(tgids)


@pytest.fixture
def clock_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: by so many seconds the clock of programs that are started from now on is off."""
    source, library, step = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "step"
    source.write_text(CLOCK)
    step.write_text("0")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_STEP", str(step))
    return step


def until_clock_is(agent: Agent, seconds: int) -> None:
    """Off by so much, as its snapshots have it."""
    until(lambda: abs(agent.snapshot().wall_ns / 1e9 - time.time() - seconds) < DAY / 2, "its clock to be stepped")


def still_stops(agent: Agent, name: str) -> None:
    """And resumes: a stop more is one after the last ended."""
    pauses = agent.pauses(name)
    until(lambda: agent.pauses(name) > pauses + 2, "more stops")


def test_a_clock_that_is_stepped_changes_nothing(node: Node, busy: Busy, tgids: list[int], clock_step: Path) -> None:
    with node.agent(node.policy(enforce=True, max_pause="200ms"), run_dir="stepped") as agent:
        guardian, name = agent.guardian(), node.name("training-0")
        still_stops(agent, name)
        lines = agent.decisions.stat().st_size
        for seconds in (DAY, -2 * DAY):
            clock_step.write_text(str(seconds))
            until_clock_is(agent, seconds)
            still_stops(agent, name)
        until(lambda: agent.decisions.stat().st_size > lines, "more decisions")
        agent.process.kill()
        until(lambda: is_gone(guardian), "the guardian to end")
        until_launching(node, tgids)
        assert_none_stops(tgids)
