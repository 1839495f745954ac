# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One run of one scenario: simulated GPUs, containers, the real agent; everything that was seen, and the truth.

The truth is asked for ten times a second, so that it is known to about a millisecond when a snapshot was taken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError
from agent.core.model import Snapshot
from agent.exporters.api.client import fetch
from bench.attribution import nvml
from bench.attribution.agent import Agents
from bench.attribution.recording import Recording, TruthSample
from bench.attribution.scenarios import Scenario
from bench.attribution.stage import Containers, running
from tools.harness.node import BUILD, Node, simulated_node

_TRUTH_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.2
_OLDER_SECONDS: Final = 3.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run: let everything settle, then measure."""

    warm_up: float
    measured: float


@dataclass(slots=True)
class TruthRecorder:
    """A thread that records the simulated GPU's truth."""

    node: Node
    uuids: Mapping[int, str]  # by the simulated GPU's own number
    samples: list[TruthSample] = field(default_factory=list)
    error: str = ""
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Polls until `stop`, and once more."""
        while not self.error and not self._ending.wait(_TRUTH_SECONDS):
            self._sample()
        if not self.error:
            self._sample()

    def stop(self) -> None:
        """Ends the thread soon; does not wait."""
        self._ending.set()

    def _sample(self) -> None:
        before = time.monotonic_ns()
        done = subprocess.run(
            [BUILD / "bin" / "gpusim", "truth"], env=self.node.environment, capture_output=True, text=True
        )
        at_ns = (before + time.monotonic_ns()) // 2
        self.error = done.stderr.strip()
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.samples.append(TruthSample(at_ns, {(row["pid"], self.uuids[row["device"]]): row["sm_ns"] for row in rows}))


def record(scenario: Scenario, times: Times, folder: Path, agents: Agents) -> Recording:
    """Runs it. SetupError when some part of it fails."""
    folder.mkdir()
    with (
        _gpus(folder, scenario) as node,
        node.mps_daemon() if scenario.mps else nullcontext(),
        _truth(node) as truth,
        ExitStack() as stack,
    ):
        at_work = running(node, folder / "containers", truth.uuids, scenario.tenants)
        if scenario.older:
            containers = stack.enter_context(at_work)
            time.sleep(_OLDER_SECONDS)  # they make their contexts and graphs
        with agents.observing(node, folder / "agent") as socket:
            if not scenario.older:
                containers = stack.enter_context(at_work)
            listings = stack.enter_context(_nvml(node, folder / "nvml"))
            snapshots = _watch(socket, Times(times.warm_up, 0) if scenario.restarted else times)
        if scenario.restarted:
            agents.wait_until_ended()
            with agents.observing(node, folder / "agent") as socket:
                snapshots = _watch(socket, Times(0, times.measured))
        time.sleep(2 * _TRUTH_SECONDS)  # for the truth on the far side of the last snapshot
        for tenant in scenario.tenants:
            containers.require_alive(tenant)
    if truth.error:
        raise SetupError(f"the simulated GPU does not answer: {truth.error}")
    return _recording(containers, snapshots, truth, nvml.parse(listings.read_text()), times)


def _gpus(folder: Path, scenario: Scenario) -> AbstractContextManager[Node]:
    credited = "client" if scenario.clients_credited else "server"
    divided = {"mig": scenario.mig} if scenario.mig else {}
    return simulated_node(folder / "gpu", {"gpus": str(scenario.gpus), "mps_credits": credited, **divided})


def _recording(
    containers: Containers,
    snapshots: list[Snapshot],
    truth: TruthRecorder,
    listings: list[nvml.Listing],
    times: Times,
) -> Recording:
    end_ns = snapshots[-1].at_ns
    begin_ns = next(s.at_ns for s in snapshots if s.at_ns >= end_ns - (times.measured + 0.5) * NS_PER_SECOND)
    return Recording(containers.lives(), snapshots, truth.samples, listings, begin_ns, end_ns)


def _watch(socket: Path, times: Times) -> list[Snapshot]:
    """Collects every snapshot from now on."""
    snapshots: list[Snapshot] = []
    give_up = time.monotonic() + times.warm_up + times.measured + 1.0
    while time.monotonic() < give_up:
        snapshot = fetch(socket)
        if snapshot is None:
            raise SetupError(f"the agent at {socket} went away: see {socket.parent / 'log'}")
        if not snapshots or snapshot.at_ns > snapshots[-1].at_ns:
            snapshots.append(snapshot)
        time.sleep(_LOOK_SECONDS)  # between two looks, all through the time that is measured
    return snapshots


def uuids_of(node: Node) -> dict[int, str]:
    """Of its devices, by the simulated GPU's own number."""
    status = [str(BUILD / "bin" / "gpusim"), "status"]
    done = subprocess.run(status, env=node.environment, capture_output=True, text=True, check=True)
    return {row["device"]: row["uuid"] for row in map(json.loads, done.stdout.splitlines())}


@contextmanager
def _truth(node: Node) -> Iterator[TruthRecorder]:
    recorder = TruthRecorder(node, uuids_of(node))
    thread = threading.Thread(target=recorder.run)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.stop()
        thread.join()


@contextmanager
def _nvml(node: Node, output: Path) -> Iterator[Path]:
    command = [sys.executable, "-m", "bench.attribution.nvml"]
    with output.open("wb") as stdout:
        process = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **node.environment}, stdout=stdout)
    try:
        yield output
    finally:
        ended = process.poll()
        process.kill()
        process.wait()
        if ended is not None:
            raise SetupError(f"the NVML reader ended by itself ({ended}): run `python -m bench.attribution.nvml`")
