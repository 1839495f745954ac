# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent as people run it, with a policy that may be changed while it runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Final

from agent.exporters.api.client import fetch
from conformance.checks.stopping.holds import StuckError
from conformance.clients import launcher
from conformance.host import Host, Unavailable
from tools.harness.wait import until

_START_SECONDS: Final = 40.0
_END_SECONDS: Final = 25.0  # where the kernel has no uprobe_multi, probes are closed one by one
_RELOAD_SECONDS: Final = 15.0
_KNOWN_SECONDS: Final = 15.0
_MOST_WORDS: Final = 300


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A running one."""

    process: Popen[str]
    policy: Path
    log: Path

    def take(self, policy: str) -> None:
        """Goes by this policy from now on. Unavailable when it refuses."""
        before = len(self.log_text())
        _write(self.policy, policy)
        self.process.send_signal(signal.SIGHUP)
        until(
            lambda: "reloaded" in self.log_text()[before:],
            "the agent to take a policy",
            _RELOAD_SECONDS,
            error=StuckError,
        )
        if "policy reloaded" not in self.log_text()[before:]:
            raise Unavailable(f"the agent does not take the policy: {self.log_text()[before:].strip()[-_MOST_WORDS:]}")

    def wait_for(self, containers: int) -> None:
        """Until it knows so many that its policy names, with processes on a device. StuckError."""

        def known() -> bool:
            snapshot = fetch(self.policy.parent / "agent.sock")
            return snapshot is not None and len(snapshot.enforcement) >= containers

        until(known, "the agent to know the programs", _KNOWN_SECONDS, 0.1, StuckError)

    def log_text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None


@contextmanager
def running_agent(host: Host, name: str, policy: str) -> Iterator[AgentProcess]:
    """Ready, with files of that name. Unavailable where it does not start."""
    folder = host.folder / name
    folder.mkdir()
    path, log = folder / "policy.yaml", folder / "log"
    _write(path, policy)
    # Other simulated GPUs of this machine are not this node's.
    module = "tools.harness.isolated_agent" if host.simulated else "gpuwarden"
    command = launcher.module(module, "run", "--policy", str(path), "--run-dir", str(folder), "--usage", "off")
    command += ["--listen", "127.0.0.1:0", "--decisions", str(folder / "decisions.jsonl")]
    command += ["--libcuda", launcher.library(host)]
    with log.open("wb") as file:
        process = host.start(command, launcher.importing(), stdin=DEVNULL, stdout=file, stderr=file)
    made = AgentProcess(process, path, log)
    try:
        until(
            lambda: "\nready\n" in f"\n{made.log_text()}" or made.has_ended(),
            "the agent to start",
            _START_SECONDS,
            error=StuckError,
        )
        if made.has_ended():
            raise Unavailable(f"the agent does not start: {made.log_text().strip()[-_MOST_WORDS:]}")
        yield made
    finally:
        _end(host, made)


def _end(host: Host, made: AgentProcess) -> None:
    if not made.has_ended():
        made.process.terminate()
        try:
            made.process.wait(_END_SECONDS)
        except TimeoutExpired:
            host.end(made.process)
            return
    host.end(made.process)


def _write(path: Path, policy: str) -> None:
    """Writes a policy with permissions that the agent accepts."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(policy)
