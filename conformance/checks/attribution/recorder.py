# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Threads that write down what the agent says, what NVML alone says, and on the simulated GPU what really happened."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import WardenError
from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from bench.attribution import nvml
from bench.attribution.nvml import Listing
from bench.attribution.recording import TruthSample
from bench.attribution.run import TruthRecorder, uuids_of
from conformance.host import Host
from conformance.machine_state import ROOT
from tools.harness.wait import poll

_LOOK_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 5.0


@dataclass(slots=True)
class Snapshots:
    """Every snapshot of an agent, in order; without an agent, empty ones that only tell the two clocks' difference."""

    socket: Path | None
    taken: list[Snapshot] = field(default_factory=list)
    error: str = ""
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Polls until `stop`, or until the agent is gone."""
        while not self.error and not self._ending.wait(_LOOK_SECONDS):
            self._look()

    def stop(self) -> None:
        """The thread ends soon."""
        self._ending.set()

    def after(self, at_ns: int) -> Snapshot:
        """The first one that was taken after that time. RuntimeError: none came."""

        def found() -> Snapshot | None:
            return next((snapshot for snapshot in self.taken if snapshot.at_ns > at_ns), None)

        poll(lambda: found() or self.error, _PATIENCE_SECONDS, _LOOK_SECONDS / 4)
        if (snapshot := found()) is None:
            raise RuntimeError(
                f"no snapshot of the agent in {_PATIENCE_SECONDS:g} s: {self.error or 'it takes no more'}"
            )
        return snapshot

    def _look(self) -> None:
        if self.socket is None:
            now_ns = time.monotonic_ns()
            self.taken.append(Snapshot(now_ns, time.time_ns(), NS_PER_SECOND))
            return
        try:
            snapshot = fetch(self.socket)
        except WardenError as error:
            self.error = str(error)
            return
        if snapshot is None:
            self.error = "the agent went away"
        elif not self.taken or snapshot.at_ns > self.taken[-1].at_ns:
            self.taken.append(snapshot)


@dataclass(frozen=True, slots=True)
class Recorder:
    """All sources of a recording. `truth` None on a real GPU."""

    snapshots: Snapshots
    truth: TruthRecorder | None
    reader: Popen[str]  # of NVML alone
    _nvml: Path

    def nvml_ended(self) -> str | None:
        """Why NVML alone is not read any more; None: it is."""
        if self.reader.poll() is None:
            return None
        words = self.reader.stderr.read().strip() if self.reader.stderr is not None else ""
        return words.split("\n")[-1] or "it ended by itself"

    def listings(self) -> list[Listing]:
        """What NVML alone has reported so far."""
        return nvml.parse(self._nvml.read_text())

    def true_samples(self) -> list[TruthSample]:
        """So far; RuntimeError when the simulated GPU does not answer."""
        if self.truth is None:
            return []
        if self.truth.error:
            raise RuntimeError(f"the simulated GPU does not answer: {self.truth.error}")
        return list(self.truth.samples)


@contextmanager
def recording(host: Host, socket: Path | None) -> Iterator[Recorder]:
    """Everything from now to the end of the block."""
    snapshots = Snapshots(socket)
    truth = TruthRecorder(host.node, uuids_of(host.node)) if host.simulated else None
    output = host.folder / "nvml.jsonl"
    with ExitStack() as stack:
        with output.open("w") as stdout:
            words = [sys.executable, "-m", "bench.attribution.nvml"]
            reader = host.start(words, cwd=ROOT, stdout=stdout, stdin=subprocess.DEVNULL)
        stack.callback(host.end, reader)
        for one in (snapshots, truth):
            if one is not None:
                thread = threading.Thread(target=one.run, daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(one.stop)
        yield Recorder(snapshots, truth, reader, output)
