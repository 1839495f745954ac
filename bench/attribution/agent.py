# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent as people run it, one for each scenario, so that none knows anything from the one before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tools.harness import agents
from tools.harness.node import Node


@dataclass(slots=True)
class Agents:
    """The agents of a run of the bench. One takes seconds to end, in which the next is at work already."""

    isolated: bool = False  # see tools.harness.isolated_agent
    _ending: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def observing(self, node: Node, run_dir: Path) -> Iterator[Path]:
        """Starts `gpuwarden run`; yields its socket once it is ready."""
        agents.require_no_policy()
        run_dir.mkdir(exist_ok=True)
        command = agents.command("--run-dir", run_dir, isolated=self.isolated)
        process = agents.start(command, run_dir / "log", node.environment)
        self._ending.callback(agents.end, process)
        try:
            agents.wait_until_ready(process, run_dir / "log")
            yield run_dir / "agent.sock"
        finally:
            process.terminate()

    def wait_until_ended(self) -> None:
        """Those that are not observing any more."""
        self._ending.close()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_until_ended()
