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

from agent import endpoint
from agent.clock import NS_PER_SECOND
from agent.errors import WardenError
from agent.model import Snapshot
from bench import attribution_nvml
from bench.attribution_nvml import Listing
from bench.attribution_recording import TruthSample
from bench.attribution_run import TruthRecorder
from gpu.here import Here
from gpu.look import ROOT

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
        """Until `stop`, or until the agent is gone."""
        while not self.error and not self._ending.wait(_LOOK_SECONDS):
            self._look()

    def stop(self) -> None:
        """The thread ends soon."""
        self._ending.set()

    def after(self, at_ns: int) -> Snapshot:
        """The first one that was taken after that time. RuntimeError: none came."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and not self.error:
            found = next((snapshot for snapshot in self.taken if snapshot.at_ns > at_ns), None)
            if found is not None:
                return found
            time.sleep(_LOOK_SECONDS / 4)
        raise RuntimeError(f"no snapshot of the agent in {_PATIENCE_SECONDS:g} s: {self.error or 'it takes no more'}")

    def _look(self) -> None:
        if self.socket is None:
            now_ns = time.monotonic_ns()
            self.taken.append(Snapshot(now_ns, time.time_ns(), NS_PER_SECOND))
            return
        try:
            snapshot = endpoint.fetch(self.socket)
        except WardenError as error:
            self.error = str(error)
            return
        if snapshot is None:
            self.error = "the agent went away"
        elif not self.taken or snapshot.at_ns > self.taken[-1].at_ns:
            self.taken.append(snapshot)


@dataclass(frozen=True, slots=True)
class Recorder:
    """All of them. `truth` None on a real GPU."""

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
        """What NVML alone told so far."""
        return attribution_nvml.parse(self._nvml.read_text())

    def true_samples(self) -> list[TruthSample]:
        """So far; RuntimeError when the simulated GPU does not answer."""
        if self.truth is None:
            return []
        if self.truth.error:
            raise RuntimeError(f"the simulated GPU does not answer: {self.truth.error}")
        return list(self.truth.samples)


@contextmanager
def recording(here: Here, socket: Path | None) -> Iterator[Recorder]:
    """Everything from now to the end of the block."""
    snapshots = Snapshots(socket)
    truth = TruthRecorder(here.node) if here.simulated else None
    output = here.folder / "nvml.jsonl"
    with ExitStack() as stack:
        with output.open("w") as stdout:
            words = [sys.executable, "-m", "bench.attribution_nvml"]
            reader = here.start(words, cwd=ROOT, stdout=stdout, stdin=subprocess.DEVNULL)
        stack.callback(here.end, reader)
        for one in (snapshots, truth):
            if one is not None:
                thread = threading.Thread(target=one.run, daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(one.stop)
        yield Recorder(snapshots, truth, reader, output)
