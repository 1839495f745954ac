# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench watching`: what being watched costs an offline process that is not slowed.

Its launch rate beside the agent, over that with an empty BPF program on the same probes: what any watching by uprobes
costs is in both. The agent watches one copy of libcuda and the empty program another one, all the time, and short runs
with either take turns, so that what else happens on the machine hits both alike. The process has a CPU of its own. It
holds when the median ratio of the rounds is at least 0.95.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from agent.probes.libbpf import load_uprobes
from bench.enforcement.agent import Promise, agent
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.stage import Cpus, Stage, open_stage
from tools.harness.uprobes import MEASURING, agents_functions, attached

LEAST_RATIO: Final = 0.95
_EMPTY: Final = MEASURING / "empty.bpf.o"
_LIBRARY: Final = BUILD / "lib" / "libcuda.so.1"
# Launches without end, as fast as the process can: kernels of 2 µs, and a wait for each two hundred.
LAUNCHING: Final = ("--kernels", "200", "--kernel-us", "2", "--blocks", "1", "--iterations-per-us", "100")


def launches_per_second(stage: Stage[Node], library: Path, seconds: float) -> float:
    """Launch rate of a process that uses this copy of libcuda."""
    summary = stage.folder / "summary.json"
    arguments = [*LAUNCHING, "--seconds", str(seconds), "--json", str(summary)]
    workload = stage.start("offline", arguments, {"LD_LIBRARY_PATH": str(library.parent)})
    if not workload.wait(seconds + 60):
        workload.require_alive()
    stage.end([workload])
    return float(json.loads(summary.read_text())["kernels_per_second"])


@contextmanager
def empty_probes(library: Path, built: Path = _EMPTY) -> Iterator[None]:
    """An empty program at each place at which the agent has one. ProbeError, SetupError."""
    with load_uprobes(built, {"empty"}) as bpf, attached(bpf, library, partial(agents_functions, program="empty")):
        yield


@contextmanager
def libraries(stage: Stage[Node]) -> Iterator[dict[str, Path]]:
    """Three copies of libcuda: one without a probe, one with empty ones, and the one that the agent watches."""
    copies = {name: stage.folder / name / _LIBRARY.name for name in ("bare", "empty")}
    for copy in copies.values():
        copy.parent.mkdir()
        shutil.copy(_LIBRARY, copy)
    promise = Promise("headroom", "gpu_wait", 0, 1e9, 10.0)
    with empty_probes(copies["empty"]), agent(stage, promise, isolated=True) as warden:
        stage.cpus.bind(warden.process.pid, online=True)
        yield {**copies, "watched": _LIBRARY}


def rounds(stage: Stage[Node], count: int, seconds: float) -> Iterator[dict[str, float]]:
    """Launch rates with each of the libraries; the order turns with each round."""
    with libraries(stage) as copies:
        for number in range(count):
            names = list(copies)[:: 1 if number % 2 else -1]
            rates = {name: launches_per_second(stage, copies[name], seconds) for name in names}
            if number:  # the first is for caches, clocks and whatever else has to wake
                yield rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when being watched costs little enough."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.watching", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement (default %(default)s)")
    options = parser.parse_args(arguments)
    ratios, of_nothing = [], []
    with tempfile.TemporaryDirectory(prefix="gpuwarden-watching-") as name:
        folder, cpus = Path(name), Cpus.split()
        with simulated_node(folder / "gpu") as node, open_stage(node, folder, cpus) as stage:
            cpus.bind(node.server_tgid, online=True)
            for rates in rounds(stage, options.rounds + 1, options.seconds):
                ratios.append(rates["watched"] / rates["empty"])
                of_nothing.append(rates["watched"] / rates["bare"])
                shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                print(f"launches a second: {shown}: {ratios[-1]:.3f} of those with empty probes", flush=True)
    print(
        f"watching: {median(ratios):.3f} of the launch rate with empty probes (median of {len(ratios)} rounds; "
        f"aimed for: {LEAST_RATIO}), {median(of_nothing):.3f} of that without probes"
    )
    return 0 if median(ratios) >= LEAST_RATIO else 1


if __name__ == "__main__":
    raise SystemExit(main())
