# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Is the simulated GPU as hard on an online workload as real ones are? Its contention against a published table.

A BERT-like online workload beside a ResNet-like and a Whisper-like offline one, uncontrolled, under the three ways in
which a GPU is shared. The same arrivals in every run. Writes bench/results/calibration.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.calibration.report import PUBLISHED, Outcome, Result, write_report
from tools.harness.node import Node, simulated_node
from tools.harness.quiet import measure_undisturbed
from tools.harness.workloads import BERT_LIKE, BERT_RATE, RESNET_LIKE, WHISPER_LIKE

REPORT = Path(__file__).parents[1] / "results" / "calibration.md"
OFFLINE = {"ResNet-like": RESNET_LIKE, "Whisper-like": WHISPER_LIKE}
BELOW_NORMAL = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
_ALONE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What every run of the online workload has in common."""

    requests: int
    seed: int

    @property
    def online(self) -> list[str]:
        """Arguments of the online workload."""
        rest = ["--requests", str(self.requests), "--seconds", "1000000", "--seed", str(self.seed)]
        return [*BERT_LIKE, *BERT_RATE, *rest]


@contextmanager
def offline_beside(node: Node, arguments: Sequence[str], priority: bool) -> Iterator[list[Any]]:
    """An offline workload that is already busy; its summary is in the list after the block."""
    process = node.start("offline", [*arguments, "--seconds", "0"], BELOW_NORMAL if priority else None)
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"the offline workload did not start: {process.communicate()[1]}")
    summary: list[Any] = []
    yield summary
    process.terminate()
    summary.append(json.loads(process.communicate(timeout=120)[0]))


def measure_pair(node: Node, settings: Settings, arguments: Sequence[str], priority: bool) -> tuple[Any, Any]:
    """Summaries of the online and of the offline workload, side by side for the same time."""
    online = node.start("online", settings.online)
    assert online.stdout
    if online.stdout.readline() != "ready\n":
        raise RuntimeError(f"the online workload did not start: {online.communicate()[1]}")
    with offline_beside(node, arguments, priority) as offline:
        out, err = online.communicate("g", timeout=600)
        if online.returncode != 0:
            raise RuntimeError(f"the online workload failed: {err}")
    return json.loads(out), offline[0]


def measure_alone(node: Node, settings: Settings) -> tuple[Any, dict[str, Any]]:
    """Summaries of the online workload and of each offline one, each with the GPU to itself."""
    online = node.run("online", [*settings.online, "--start-now"])
    offline = {
        name: node.run("offline", [*arguments, "--seconds", str(_ALONE_SECONDS)]) for name, arguments in OFFLINE.items()
    }
    for done in (online, *offline.values()):
        if done.returncode != 0:
            raise RuntimeError(f"a workload failed: {done.stderr}")
    summaries = {name: json.loads(done.stdout.removeprefix("ready\n")) for name, done in offline.items()}
    return json.loads(online.stdout.removeprefix("ready\n")), summaries


def shared(node: Node, sharing: str) -> AbstractContextManager[None]:
    """The way of sharing: MPS, or what a GPU does without it."""
    return node.mps_daemon() if sharing.startswith("MPS") else nullcontext()


def measure_sharing(folder: Path, settings: Settings, sharing: str, name: str) -> Outcome:
    """Runs one pair on a node of its own."""

    def measure_once() -> tuple[Any, Any]:
        own = Path(tempfile.mkdtemp(dir=folder))
        with simulated_node(own) as node, shared(node, sharing):
            return measure_pair(node, settings, OFFLINE[name], "priority" in sharing)

    (online, offline), pressure = measure_undisturbed(measure_once)
    return Outcome(sharing, name, online, offline, pressure)


def measure(settings: Settings) -> Result:
    """Runs everything, one after another."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpuwarden-calibration-") as folder:
        with simulated_node(Path(folder) / "alone") as node:
            (online, offline), pressure = measure_undisturbed(lambda: measure_alone(node, settings))
        for sharing in PUBLISHED:
            for name in OFFLINE:
                outcomes.append(measure_sharing(Path(folder), settings, sharing, name))
                print(outcomes[-1].line(online, offline[name]), flush=True)
    return Result(online, offline, tuple(outcomes), pressure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write down. 1 when a pair is further from the published row than a factor of 2."""
    parser = argparse.ArgumentParser(prog="python -m bench.calibration", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=3000, help="of the online workload in each run (default 3000)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default 1)")
    parser.add_argument("--output", type=Path, default=REPORT, help="where to write the report")
    options = parser.parse_args(arguments)
    result = measure(Settings(options.requests, options.seed))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(write_report(result, options.requests, options.seed))
    print(f"calibration: {result.verdict()}; see {options.output}")
    return 0 if result.fits() else 1


if __name__ == "__main__":
    sys.exit(main())
