# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How does the law find its way? Latency, queue and share over time, for a step and for a burst, as pictures.

The step: an offline workload begins beside an online one, and ends. The burst: the online side's load goes from a fifth
to four fifths for a while, beside an offline workload. Latencies are the online workload's own record, the rest is the
decision log. Needs matplotlib: `make bench-convergence` installs it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from agent.core.errors import SetupError
from bench.enforcement.agent import Agent, Promise, agent
from bench.enforcement.convergence_plot import Course, plot
from bench.enforcement.pairs import SERVICE
from tools.harness.arrivals import poisson, write_trace
from tools.harness.node import Node, simulated_node
from tools.harness.stage import Cpus, Stage, Workload, open_stage
from tools.harness.wait import until
from tools.harness.workloads import RESNET_LIKE

RESULTS: Final = Path(__file__).parents[1] / "results"
_ALONE_SECONDS: Final = 10.0
_RATE: Final = {"low": 100.0, "middle": 250.0, "high": 400.0}  # 20, 50 and 80 % of the GPU's time


@dataclass(frozen=True, slots=True)
class Scene:
    """Arrivals, and when the offline side is there; `marks` are what the picture points at. Seconds."""

    name: str
    title: str
    arrivals: tuple[float, ...]
    offline_from: float
    offline_until: float
    ends: float
    marks: tuple[tuple[float, str], ...]
    alone_rate: float  # at which the target is found


def scenes(scale: float) -> tuple[Scene, Scene]:
    """`scale`: 1 is the whole, 0.1 a tenth as long."""
    begin, end, over = 10 * scale, 35 * scale, 45 * scale
    rise, fall = 15 * scale, 25 * scale
    step = Scene(
        "convergence-step",
        "an offline workload begins, and ends",
        tuple(poisson(_RATE["middle"], over, 1)),
        begin,
        end,
        over,
        ((begin, "offline begins"), (end, "offline ends")),
        _RATE["middle"],
    )
    parts = ((0.0, rise, "low"), (rise, fall, "high"), (fall, over, "low"))
    burst = Scene(
        "convergence-burst",
        "the online load goes from 20 % to 80 %, and back",
        tuple(a + at for n, (a, b, rate) in enumerate(parts) for at in poisson(_RATE[rate], b - a, n)),
        0.0,
        over,
        over,
        ((rise, "burst begins"), (fall, "burst ends")),
        _RATE["high"],
    )
    return step, burst


def alone_ns(stage: Stage[Node], warden: Agent, rate: float) -> float:
    """The online side's p99 by gpu_wait, alone at this rate and watched: what the target is a multiple of."""
    if refused := warden.take(Promise("headroom", "gpu_wait", 0, 1e9, _ALONE_SECONDS), enforce=False):
        raise SetupError(f"the agent does not take the policy: {refused}")
    trace, found = stage.folder / "alone.log", []
    write_trace(poisson(rate, _ALONE_SECONDS, 1), trace)
    timing = ["--trace", str(trace), "--seconds", str(_ALONE_SECONDS), "--iterations-per-us", "100"]
    with ExitStack() as stack:
        stack.callback(stage.end)
        online = stage.start("online", [*SERVICE, *timing])
        stage.go(online)
        while online.process.poll() is None:
            found.append(warden.latency_ns())
            time.sleep(0.2)  # between two looks at the latency, as long as the service runs
    known = [latency_ns for latency_ns in found if latency_ns is not None]
    if not known:
        raise SetupError("the agent has read no latency of the online side alone: see its log")
    return known[-1]


def record(stage: Stage[Node], warden: Agent, scene: Scene, target_ratio: float) -> Course:
    """Runs the scene; returns its course."""
    target_ns = target_ratio * alone_ns(stage, warden, scene.alone_rate)
    promise = Promise("headroom", "gpu_wait", 0, target_ns, 10.0)
    if refused := warden.take(promise):
        raise SetupError(f"the agent does not take the policy: {refused}")
    trace, log, summary = (stage.folder / name for name in ("arrivals", "requests.log", "online.json"))
    write_trace(scene.arrivals, trace)
    sinks = ["--log", str(log), "--json", str(summary)]
    timing = ["--trace", str(trace), "--seconds", str(scene.ends), "--iterations-per-us", "100"]
    online = stage.start("online", [*SERVICE, *timing, *sinks])
    with ExitStack() as stack:
        stack.callback(stage.end)
        if not scene.offline_from:
            _start_offline(stage)
        begun, wall_ns = time.monotonic(), time.time_ns()
        stage.go(online)
        if scene.offline_from:
            time.sleep(scene.offline_from)  # the scene's own times
            offline = _start_offline(stage)
            time.sleep(max(0.0, begun + scene.offline_until - time.monotonic()))
            stage.end([offline])
        until(lambda: online.process.poll() is not None, "the online service to end", scene.ends + 60, error=SetupError)
    rows = [tuple(float(word) for word in line.split()) for line in log.read_text().splitlines()]
    decisions = [d for d in _decisions(warden) if d["kind"] == "decision" and d["wall_ns"] >= wall_ns]
    return Course(
        title=f"{scene.title} (simulated GPU, headroom, target {target_ratio:g}× the p99 alone)",
        target_ms=promise.target_ns / 1e6,
        requests=tuple((arrival + latency, latency * 1e3, service * 1e3) for arrival, latency, service in rows),
        decisions=tuple(
            ((d["wall_ns"] - wall_ns) / 1e9, d["max_queued_ns"] / 1e6, d["share_after"]) for d in decisions
        ),
        marks=scene.marks,
        held_until_s=scene.offline_until,
        ends_s=scene.ends,
    )


def _start_offline(stage: Stage[Node]) -> Workload:
    return stage.start("offline", [*RESNET_LIKE, "--iterations-per-us", "100", "--seconds", "0"])


def _decisions(warden: Agent) -> list[dict[str, Any]]:
    if not warden.decisions.exists():
        raise SetupError("nothing was decided: see the agent's log")
    return [json.loads(line) for line in warden.decisions.read_text().split("\n")[:-1]]


@contextmanager
def _stage(folder: Path) -> Iterator[tuple[Stage[Node], Agent]]:
    cpus = Cpus.split()
    with simulated_node(folder / "gpu") as node, open_stage(node, folder, cpus) as stage:
        cpus.bind(node.server_tgid, online=True)
        with agent(stage, Promise("headroom", "gpu_wait", 0, 1e9, 10.0), isolated=True) as warden:
            yield stage, warden


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pictures, which are judged by eye."""
    parser = argparse.ArgumentParser(prog="python -m bench.enforcement.convergence", description=__doc__)
    parser.add_argument("--target", type=float, default=1.5, metavar="T", help="times the p99 alone (%(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times (default %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="where the pictures go")
    options = parser.parse_args(arguments)
    if find_spec("matplotlib") is None:
        print("convergence: the pictures need matplotlib: `make bench-convergence` installs it", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory(prefix="gpuwarden-convergence-") as folder, _stage(Path(folder)) as staged:
        for scene in scenes(options.scale):
            course = record(*staged, scene, options.target)
            path = options.output / f"{scene.name}.png"
            plot(course, path)
            print(
                f"convergence: {len(course.requests)} requests, {len(course.decisions)} decisions: {path}", flush=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
