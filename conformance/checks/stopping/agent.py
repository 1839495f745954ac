# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent as people run it, with a policy that may be changed while it runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Final

from gpu import clients
from gpu.here import Here, Unavailable
from gpu.stopping.brakes import StuckError

_START_SECONDS: Final = 40.0
_END_SECONDS: Final = 25.0  # where the kernel has no uprobe_multi, probes are closed one by one
_RELOAD_SECONDS: Final = 15.0
_KNOWN_SECONDS: Final = 15.0
_MOST_WORDS: Final = 300


@dataclass(frozen=True, slots=True)
class Warden:
    """A running one."""

    process: Popen[str]
    policy: Path
    log: Path

    def take(self, policy: str) -> None:
        """Goes by this policy from now on. Unavailable when it refuses."""
        before = len(self.said())
        _write(self.policy, policy)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: "reloaded" in self.said()[before:], "the agent to take a policy", _RELOAD_SECONDS)
        if "policy reloaded" not in self.said()[before:]:
            raise Unavailable(f"the agent does not take the policy: {self.said()[before:].strip()[-_MOST_WORDS:]}")

    def wait_for(self, containers: int) -> None:
        """Until it knows so many that its policy names, with processes on a device. StuckError."""
        from agent import endpoint

        def known() -> bool:
            snapshot = endpoint.fetch(self.policy.parent / "agent.sock")
            return snapshot is not None and len(snapshot.enforcement) >= containers

        until(known, "the agent to know the programs", _KNOWN_SECONDS, 0.1)

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        """And is no more."""
        return self.process.poll() is not None


@contextmanager
def warden(here: Here, name: str, policy: str) -> Iterator[Warden]:
    """Ready, with files of that name. Unavailable where it does not start."""
    folder = here.folder / name
    folder.mkdir()
    path, log = folder / "policy.yaml", folder / "log"
    _write(path, policy)
    module = "bench.attribution_isolated" if here.simulated else "agent"  # other simulated GPUs are not this node's
    command = clients.module(module, "run", "--policy", str(path), "--run-dir", str(folder), "--usage", "off")
    command += ["--listen", "127.0.0.1:0", "--decisions", str(folder / "decisions.jsonl")]
    command += ["--libcuda", clients.library(here)]
    with log.open("wb") as file:
        process = here.start(command, clients.importing(), stdin=DEVNULL, stdout=file, stderr=file)
    made = Warden(process, path, log)
    try:
        until(lambda: "\nready\n" in f"\n{made.said()}" or made.has_ended(), "the agent to start", _START_SECONDS)
        if made.has_ended():
            raise Unavailable(f"the agent does not start: {made.said().strip()[-_MOST_WORDS:]}")
        yield made
    finally:
        _end(here, made)


def _end(here: Here, made: Warden) -> None:
    if not made.has_ended():
        made.process.terminate()
        try:
            made.process.wait(_END_SECONDS)
        except TimeoutExpired:
            here.end(made.process)
            return
    here.end(made.process)


def _write(path: Path, policy: str) -> None:
    """With permissions that the agent accepts."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(policy)


def until(holds: Callable[[], object], what: str, seconds: float, step: float = 0.01) -> None:
    """StuckError when it does not become true in that time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise StuckError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(step)
