# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent as people run it, one for each scenario, so that none knows anything from the one before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agent.errors import SetupError
from agent.main import DEFAULT_POLICY
from bench.node import Node

_ROOT = Path(__file__).resolve().parents[1]
_READY_SECONDS = 60.0


@dataclass(slots=True)
class Agents:
    """The agents of a run of the bench. One that is told to end takes seconds, in which the next is at work already."""

    isolated: bool = False  # see bench.attribution_isolated
    _ending: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def observing(self, node: Node, run_dir: Path) -> Iterator[Path]:
        """`gpuwarden run`, ready; the socket on which it answers."""
        if DEFAULT_POLICY.exists():
            raise SetupError(f"{DEFAULT_POLICY} would have the agent enforce: move it away for the measurement")
        run_dir.mkdir()
        module = "bench.attribution_isolated" if self.isolated else "agent"
        command = [sys.executable, "-m", module, "run", "--listen", "127.0.0.1:0", "--run-dir", str(run_dir)]
        with (run_dir / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=_ROOT, env={**os.environ, **node.environment}, stdout=log, stderr=log
            )
        self._ending.callback(_reap, process)
        try:
            _wait_until_ready(process, run_dir / "log")
            yield run_dir / "agent.sock"
        finally:
            process.terminate()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=_READY_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while "\nready\n" not in "\n" + log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SetupError(f"the agent did not start: {log.read_text().strip()[-2000:]}")
        time.sleep(0.05)
