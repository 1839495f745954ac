# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A whole node for the tests from outside: simulated GPU, real runc containers, the agent as a process of its own.

Several people's nodes may share one machine, so every name in it carries a token: no policy of one matches a container
of another. Where the kernel has no uprobe_multi, ending an agent takes ten seconds, so tests share one where they can.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.model import ContainerUsage, EnforcementStatus, Snapshot
from agent.exporters.api.client import fetch
from sim.demo.stage import Stage, simulated_gpu
from tools.harness.agents import backstops, guardians
from tools.harness.containers import Container, Mount
from tools.harness.node import BUILD
from tools.harness.wait import until

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_SECONDS = 60.0
ISOLATED = "tools.harness.isolated_agent"

# Requests that always overlap: the gate stays shut, so a stop lasts until it is undone or max_pause is over.
ALWAYS_BUSY = ("--rate", "10", "--kernels", "40", "--kernel-us", "5000", "--seconds", "3600", "--start-now")

TRAINING = ("--kernels", "20", "--kernel-us", "500", "--seconds", "3600")

POLICY = """\
version: 1
enforce: {enforce}
online:
  - name: chat
    match: {{container: "chat-{token}"}}
    slo: {{signal: gpu_wait, quantile: 0.99, target: 400ms, window: 10s}}
offline:
  - name: training
    match: {{container: "training-{token}*"}}
    law: headroom
    limits: {{max_pause: {max_pause}, floor: 0%}}
    ladder: [gate, pace]
"""


def state(tgid: int) -> str:
    """One letter, as in /proc/PID/stat; "" when the process is gone."""
    try:
        return Path(f"/proc/{tgid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(tgid: int) -> bool:
    """Whether it runs no more: reaped, or waiting for that."""
    return state(tgid) in ("", "Z", "X")


def command_line(tgid: int) -> str:
    """With spaces between the words; "" when the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{tgid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


@dataclass(slots=True)
class Agent:
    """A running agent and what it writes."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    policy: Path | None
    port: int
    log: Path
    decisions: Path

    @property
    def socket(self) -> Path:
        """Where it answers."""
        return self.run_dir / "agent.sock"

    def snapshot(self) -> Snapshot:
        """Its newest picture; the first one may take a moment."""
        snapshot = fetch(self.socket, timeout=PATIENCE_SECONDS)
        assert snapshot is not None, self.log.read_text()
        return snapshot

    def container(self, name: str) -> ContainerUsage | None:
        """A container's row in the newest picture."""
        return next((row for row in self.snapshot().containers if row.container.name == name), None)

    def stance(self, name: str) -> EnforcementStatus | None:
        """The enforcement status of a container."""
        row = self.container(name)
        return self.snapshot().enforcement.get(row.container.key) if row else None

    def pauses(self, name: str) -> int:
        """How often a container was stopped so far."""
        stance = self.stance(name)
        return stance.pauses_total if stance else 0

    def metrics(self) -> str:
        """What a scrape gets."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def guardian(self) -> int:
        """The guardian's pid, once there is one."""
        until(lambda: guardians(self.run_dir), "a guardian")
        return guardians(self.run_dir)[0]

    def backstop(self) -> int:
        """The backstop's pid, once there is one."""
        until(lambda: backstops(self.run_dir), "a backstop")
        return backstops(self.run_dir)[0]

    def reload(self, text: str) -> str:
        """A new policy and SIGHUP; returns what the agent logs until it has taken or refused it."""
        assert self.policy is not None
        self.policy.write_text(text)
        before = len(self.log.read_text())
        self.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded" in self.log.read_text()[before:], "the policy to be reloaded or refused")
        return self.log.read_text()[before:]


@dataclass(slots=True)
class Node:
    """Where everything is. `token` is in the name of every container."""

    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def stage(self) -> Stage:
        """The same as the demo knows it."""
        return Stage(self.folder)

    @property
    def ledger(self) -> tuple[str, str]:
        """Options that keep the usage of the simulated GPU out of the machine's own usage file."""
        return ("--usage", str(self.folder / "usage.sqlite"))

    @property
    def environment(self) -> dict[str, str]:
        """For programs that use the simulated GPU."""
        return {**os.environ, **self.stage.environment}

    def name(self, name: str) -> str:
        """A container's name as the agent shows it."""
        head, _, tail = name.partition("-")
        return f"{head}-{self.token}{'-' if tail else ''}{tail}"

    def policy(self, *, enforce: bool, max_pause: str = "5s") -> str:
        """The policy for "chat" (online) and "training…" (offline)."""
        return POLICY.format(enforce="true" if enforce else "false", token=self.token, max_pause=max_pause)

    def truth(self) -> dict[int, int]:
        """Launches per pid, as they really happened."""
        return {row["pid"]: row["launches"] for row in self.stage.truth()}

    def container(self, name: str, program: str, arguments: Sequence[str]) -> Container:
        """A container that runs one of the workloads."""
        shown = self.name(name)
        return self._start(shown, f"/gpuwarden-e2e/{shown}", [program, *arguments])

    def tenant(self, name: str, devices: str, *work: str, pod: str = "") -> Container:
        """The same on some of the devices, below a cgroup with the token."""
        path = f"/gpuwarden-e2e/{self.token}{pod}/{name}"
        return self._start(name, path, work, CUDA_VISIBLE_DEVICES=devices)

    def _start(self, name: str, cgroup_path: str, work: Sequence[str], **variables: str) -> Container:
        return Container.start(
            name,
            [str(BUILD / "bin" / work[0]), *work[1:]],
            {**self.stage.environment, **variables},
            cgroup_path=cgroup_path,
            mounts=[Mount(BUILD), Mount(self.folder, read_only=False)],
            output=self.folder / f"{name}.out",
            state=self.folder / "containers",
        )

    def command(self, *arguments: str) -> list[str]:
        """`gpuwarden …`."""
        return [sys.executable, "-m", "gpuwarden", *arguments]

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`gpuwarden …` to its end."""
        return subprocess.run(
            self.command(*arguments),
            env={**self.environment, **(env or {})},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_SECONDS,
        )

    @contextmanager
    def agent(
        self,
        policy: str | None,
        *extra: str,
        run_dir: str = "run",
        under: Sequence[str] = (),
        module: str = "gpuwarden",
    ) -> Iterator[Agent]:
        """The agent as people run it, or `under` another program. Killing or ending it inside is fine.

        `module`: ISOLATED where what other tests on this machine run would change the figures.
        """
        path = self.folder / f"{run_dir}.yaml" if policy is not None else None
        if path is not None:
            path.write_text(policy or "")
            path.chmod(0o600)
        log, decisions = self.folder / f"{run_dir}.log", self.folder / f"{run_dir}.decisions"
        port = endpoint_port()
        given = ["--policy", str(path)] if path else []
        arguments = ["run", *given, "--run-dir", str(self.folder / run_dir), *self.ledger, *extra]
        command = [*under, sys.executable, "-m", module, *arguments]
        with log.open("wb") as stderr, decisions.open("ab") as stdout:
            process = subprocess.Popen(
                [*command, "--listen", f"127.0.0.1:{port}"],
                env=self.environment,
                cwd=ROOT,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            until(lambda: "\nready\n" in "\n" + log.read_text() or process.poll() is not None, "the agent to be ready")
            assert process.poll() is None, log.read_text()
            yield Agent(process, self.folder / run_dir, path, port, log, decisions)
        finally:
            try:
                end(process, log)
            finally:
                for tgid in (*guardians(self.folder / run_dir), *backstops(self.folder / run_dir)):
                    with suppress(ProcessLookupError):  # only where the product failed to end it
                        os.kill(tgid, signal.SIGKILL)


def endpoint_port() -> int:
    """A port that is free now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[bytes], log: Path) -> None:
    """Asks, and after long insists: then the test fails with what the agent's threads were doing."""
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        time.sleep(1)  # for it to write its threads' stacks, which nothing reports
        process.kill()
        process.wait(timeout=PATIENCE_SECONDS)
        raise AssertionError(f"the agent did not end within {PATIENCE_SECONDS} s:\n{log.read_text()[-8000:]}") from None


@contextmanager
def running_node(folder: Path) -> Iterator[Node]:
    """A node with its simulated GPU; leave the block, and it is gone."""
    node = Node(folder)
    with simulated_gpu(node.stage):
        yield node
