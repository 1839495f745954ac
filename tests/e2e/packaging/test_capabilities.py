# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent with exactly the capabilities that it asks for, and with each of them taken away.

The offline work is another user's, and its libcuda lies where only that user can read: each capability has something
to do. The promise is one that cannot be kept, so the agent climbs the ladder.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.core.model import EnforcementStatus
from agent.node.preflight import ANY_KERNEL, SINCE_6_6, UPROBE_MULTI, kernel_version
from tests.e2e.node import ROOT, TRAINING, Agent, Node, endpoint_port
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

NOBODY = 65534
WITHOUT_ADMIN = kernel_version(platform.release()) >= UPROBE_MULTI
LEAST = SINCE_6_6 if WITHOUT_ADMIN else ANY_KERNEL
REQUIRED = ("CAP_BPF", "CAP_PERFMON") if WITHOUT_ADMIN else ("CAP_SYS_ADMIN",)

POLICY = """\
version: 1
enforce: true
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: http, port: {port}, quantile: 0.9, target: 100us, window: 2s, min_samples: 5}}
offline:
  - name: training
    match: {{container: "training-{token}"}}
    limits: {{max_pause: 500ms, floor: 90%, evict_grace: 1s, memory: {memory}}}
    ladder: {ladder}
"""


@dataclass(frozen=True, slots=True)
class Work:
    """An online container that is asked over HTTP all the time, and another user's offline one."""

    node: Node
    training: Container
    port: int
    closed: str  # its libcuda, as it sees it

    def policy(self, ladder: str = "[gate, pace, freeze]", memory: str = "8GiB") -> str:
        return POLICY.format(token=self.node.token, port=self.port, ladder=ladder, memory=memory)

    def stance(self, agent: Agent) -> EnforcementStatus:
        return agent.stance(self.node.name("training")) or EnforcementStatus("unknown")

    def latency(self, agent: Agent) -> float | None:
        chat = agent.stance(self.node.name("chat"))
        return chat.latency_seconds if chat else None

    def sees_its_libcuda(self, agent: Agent) -> bool:
        return any(probed.library == self.closed and probed.attached for probed in agent.snapshot().probes)


@pytest.fixture(scope="module")
def work(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    port = endpoint_port()
    closed = tmp_path_factory.mktemp("closed")
    shutil.copyfile(BUILD / "lib" / "libcuda.so.1", closed / "libcuda.so.1")
    for path in (closed / "libcuda.so.1", closed):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o700)
    with ExitStack() as stack:
        serving = ("--rate", "0", "--port", str(port), "--kernels", "4", "--kernel-us", "500", "--seconds", "3600")
        stack.enter_context(node.container("chat", "online", (*serving, "--start-now")))
        training = stack.enter_context(another_users(node, closed))
        stack.enter_context(clients(port))
        yield Work(node, training, port, str(closed / "libcuda.so.1"))


@contextmanager
def another_users(node: Node, closed: Path) -> Iterator[Container]:
    shown = node.name("training")
    as_nobody = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    with Container.start(
        shown,
        [*as_nobody, str(BUILD / "bin" / "offline"), "--memory", "2GiB", *TRAINING],
        {**node.stage.environment, "LD_LIBRARY_PATH": f"{closed}:{BUILD / 'lib'}"},
        cgroup_path=f"/gpuwarden-e2e/{shown}",
        mounts=[Mount(BUILD), Mount(closed), Mount(node.folder, read_only=False)],
        output=node.folder / f"{shown}.out",
        state=node.folder / "containers",
    ) as container:
        yield container


@contextmanager
def clients(port: int) -> Iterator[None]:
    """Requests without a pause."""
    ending = threading.Event()

    def ask() -> None:
        while not ending.wait(0.02):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/infer", timeout=30) as answer:
                answer.read()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def only(names: Collection[str]) -> list[str]:
    """A prefix: user 0 with these capabilities, as the unit runs the agent."""
    kept = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in names)])
    return ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={kept}"]


def without(name: str, names: Collection[str]) -> list[str]:
    return only([one for one in names if one != name])


def missing(agent: Agent) -> list[str]:
    """What it logs at its start, a line each."""
    lines = agent.log.read_text().splitlines()
    return [line for line in lines if "is missing" in line and "docs/capabilities.md" in line]


def nice(tgid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, tgid)


def until_it_sees(work: Work, agent: Agent) -> None:
    """The latency of its requests, and the container's own libcuda."""
    until(lambda: work.latency(agent) is not None, "the latency of its requests")
    until(lambda: work.sees_its_libcuda(agent), "the container's own libcuda")


def until_it_paces(work: Work, agent: Agent) -> None:
    until(lambda: work.stance(agent).pauses_total > 0, "the offline container to be paced")


def test_with_exactly_what_is_asked_for_on_any_kernel_nothing_is_missing_and_the_whole_ladder_works(work: Work) -> None:
    with work.node.agent(work.policy(), run_dir="any", under=only(ANY_KERNEL)) as agent:
        assert missing(agent) == []
        until(lambda: nice(agent.guardian()) == -20, "the guardian to hurry")
        until_it_sees(work, agent)
        until_it_paces(work, agent)
        until(lambda: "freeze" in work.stance(agent).rungs, "it to be frozen")
        explained = work.node.run("explain", work.node.name("training"), "--run-dir", str(agent.run_dir))
        assert (explained.returncode, explained.stderr) == (0, "")
        assert "freeze" in explained.stdout


@pytest.mark.skipif(not WITHOUT_ADMIN, reason="before Linux 6.6 probes need CAP_SYS_ADMIN")
def test_since_linux_6_6_everything_but_freezing_works_without_sys_admin_and_that_is_reported(work: Work) -> None:
    with work.node.agent(work.policy(), run_dir="least", under=only(SINCE_6_6)) as agent:
        [line] = missing(agent)
        assert "CAP_SYS_ADMIN is missing" in line
        assert "`freeze` is skipped" in line
        until_it_sees(work, agent)
        until_it_paces(work, agent)
        until(lambda: "CAP_SYS_ADMIN is missing" in work.stance(agent).troubles.get("freeze", ""), "freeze's trouble")
        assert "Operation not permitted" not in agent.log.read_text()


@pytest.mark.parametrize("name", REQUIRED)
def test_without_what_nothing_works_without_it_ends_and_names_it(name: str, node: Node, tmp_path: Path) -> None:
    command = node.command("run", "--run-dir", str(tmp_path), "--usage", "off", "--listen", "127.0.0.1:0")
    done = subprocess.run(
        [*without(name, LEAST), *command], env=node.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line.startswith(f"gpuwarden: {name} is missing, for ")


@pytest.mark.parametrize("name", ["CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH"])
def test_without_a_right_to_read_it_names_it_goes_on_and_the_library_in_the_closed_folder_is_not_probed(
    name: str, work: Work
) -> None:
    with work.node.agent(None, run_dir=f"reads-{name}", under=without(name, ANY_KERNEL)) as agent:
        [line] = missing(agent)
        assert f"{name} is missing" in line
        first = agent.snapshot().at_ns
        until(lambda: agent.snapshot().at_ns > first, "another tick")
        assert agent.snapshot().probes  # the node's own library
        assert not work.sees_its_libcuda(agent)


def test_without_the_right_to_resume_it_stops_no_process_whatever_the_policy_and_names_the_right(work: Work) -> None:
    with work.node.agent(work.policy(), run_dir="resumes", under=without("CAP_KILL", ANY_KERNEL)) as agent:
        [first, second] = missing(agent)
        assert "CAP_KILL is missing, for pidfd_send_signal(2)" in first
        assert "the policy says enforce: true, and nothing is enforced: CAP_KILL is missing" in second
        until(lambda: (work.stance(agent).share_ratio or 1) < 1, "a decision to slow it")
        snapshot = agent.snapshot()
        assert not snapshot.enforcing
        assert work.stance(agent).pauses_total == 0
        assert not (agent.run_dir / "ledger.jsonl").exists()


def test_doctor_lists_what_is_missing(node: Node) -> None:
    names = ("CAP_KILL", "CAP_SYS_PTRACE")
    command = [*only(set(ANY_KERNEL) - set(names)), *node.command("doctor")]
    done = subprocess.run(command, env=node.environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    for name in names:
        assert f"{name} is missing, for " in done.stdout
    assert "ok    probes: " in done.stdout


def test_without_a_right_to_priority_it_names_it_and_goes_on_and_evicts_another_users_container(work: Work) -> None:
    policy = work.policy("[evict]", memory="1GiB")
    with work.node.agent(policy, run_dir="evicts", under=without("CAP_SYS_NICE", ANY_KERNEL)) as agent:
        [line] = missing(agent)
        assert "CAP_SYS_NICE is missing" in line
        guardian = agent.guardian()
        until(lambda: not work.training.alive(), "the container to be evicted")
        assert nice(guardian) == nice(agent.process.pid)
