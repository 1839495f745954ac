# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent of the enforcement bench, as people run it, and the policies that it is given phase by phase."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from agent.core.errors import PolicyError, SetupError
from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from enforce.policy.load import load
from tools.harness import agents
from tools.harness.stage import GpuNode, Stage
from tools.harness.wait import until

SIGNALS: Final = {  # what each needs beyond its name
    "gpu_wait": "",
    "http": ", port: {port}",
    "prometheus": ', url: "http://127.0.0.1:{port}/metrics", metric: online_request_duration_seconds',
}

_POLICY: Final = """\
version: 1
enforce: {enforce}
online:
  - name: service
    match: {{cgroup: "{path}/online/*"}}
    slo: {{signal: {signal}{source}, quantile: 0.99, target: {target_us}us, window: {window_ms}ms}}
offline:
  - name: batch
    match: {{cgroup: "{path}/offline/*"}}
    law: {law}
    ladder: [{ladder}]
tuning: {{tgs_sample: {tgs_sample_ms}ms}}
"""

TGS_SAMPLE_SECONDS: Final = 2.0  # 5 as published; then a run would take half an hour longer


class PolicyText(Protocol):
    """A policy, for containers below a cgroup."""

    def text(self, path: str, enforce: bool = True) -> str:
        """Its YAML."""
        ...


@dataclass(frozen=True, slots=True)
class Promise:
    """What a phase's policy says. The window is as long as what is measured."""

    law: str
    signal: str
    port: int
    target_ns: float
    window_seconds: float
    ladder: tuple[str, ...] = ("gate", "pace")
    tgs_sample_seconds: float = TGS_SAMPLE_SECONDS

    def text(self, path: str, enforce: bool = True) -> str:
        """The policy's YAML."""
        return _POLICY.format(
            enforce="true" if enforce else "false",
            path=path,
            signal=self.signal,
            source=SIGNALS[self.signal].format(port=self.port),
            target_us=max(1, round(self.target_ns / 1e3)),
            window_ms=max(1000, round(self.window_seconds * 1e3)),
            law=self.law,
            ladder=", ".join(self.ladder),
            tgs_sample_ms=round(self.tgs_sample_seconds * 1e3),
        )


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent."""

    process: subprocess.Popen[bytes]
    folder: Path
    path: str  # of the containers' cgroups

    def take(self, promise: PolicyText, enforce: bool = True) -> str:
        """Goes by this policy from now on; returns why not, or "" when it does."""
        before = self._reloads()
        write_policy(self.folder / "policy.yaml", promise.text(self.path, enforce))
        if refused := refusal(self.folder / "policy.yaml"):
            return refused
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self._reloads() > before, "the agent to take a policy", error=SetupError)
        return "" if self._log().rstrip().endswith("policy reloaded") else self._log().strip().splitlines()[-1]

    def snapshot(self) -> Snapshot | None:
        """Its newest snapshot."""
        return fetch(self.folder / "agent.sock")

    def latency_ns(self) -> float | None:
        """The online container's latency, as the signal reads it."""
        snapshot = self.snapshot()
        found = [stance for stance in snapshot.enforcement.values() if stance.role == "online"] if snapshot else []
        latency = found[0].latency_seconds if found else None
        return None if latency is None else latency * 1e9

    @property
    def decisions(self) -> Path:
        """Its decisions, a JSON object each."""
        return self.folder / "decisions.jsonl"

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def _reloads(self) -> int:
        return self._log().count("policy reloaded") + self._log().count("policy not reloaded")


@contextmanager
def agent(stage: Stage[GpuNode], promise: PolicyText, *, isolated: bool) -> Iterator[Agent]:
    """It watches, decides and does nothing until it is given another policy."""
    folder = stage.folder / "agent"
    folder.mkdir()
    write_policy(folder / "policy.yaml", promise.text(stage.path, enforce=False))
    if refused := refusal(folder / "policy.yaml"):
        raise PolicyError([refused])
    where = ["--run-dir", folder, "--usage", "off"]
    policy = ["--policy", folder / "policy.yaml", "--decisions", folder / "decisions.jsonl"]
    command = agents.command(*where, *policy, isolated=isolated)
    with agents.running(command, folder / "log", stage.node.environment) as process:
        stage.cpus.bind(process.pid, online=False)
        yield Agent(process, folder, stage.path)


def refusal(policy: Path) -> str:
    """Why an agent would not take it, in one line and without the file's name; "" when it would."""
    try:
        load(policy, strict_permissions=True)
    except PolicyError as error:
        return "; ".join(problem.partition(": ")[2] for problem in error.problems)
    return ""


def write_policy(path: Path, text: str) -> None:
    """Writes a policy with permissions that the agent accepts."""
    path.write_text(text)
    path.chmod(0o600)
