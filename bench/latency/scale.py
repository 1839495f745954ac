# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench scale`: what many processes, containers and kernel functions cost the agent, and if it counts all.

It holds when every launch was counted, no map lost any, and series are as many as containers make, not as processes or
functions do.

Of a process that ended before environment was read the device is unknown where there are several: its launches
are reported as lost, and every one has to be either counted or lost. CPU time and memory are printed, not judged: a
uprobe costs what the machine makes it cost.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.latency import footprint
from bench.latency.scale_stage import Cost, Load, Stage, open_stage

SERIES_PER_CONTAINER = 32
SERIES_OF_NODE = 1000
MIB = 1 << 20


def loads(scale: int) -> tuple[Load, ...]:
    """The three loads, each `scale` times smaller."""
    return (
        Load("alive", 1000 // scale, 1000 // scale, 5, 4, hold=True),
        Load("short-lived", 10_000 // scale, 1000 // scale, 1, 3, hold=False),
        Load("functions", 50 // min(scale, 10), 50 // min(scale, 10), 1000, 1, hold=True),
    )


def bounded(cost: Cost, containers: int) -> bool:
    """Whether there are no more series than containers account for."""
    return cost.series <= SERIES_OF_NODE + SERIES_PER_CONTAINER * containers


def lost_in_kernel(cost: Cost) -> dict[str, int]:
    """Events for which a map or a buffer had no room."""
    return {name: count for name, count in cost.lost.items() if not name.startswith("launches:")}


def run(stage: Stage, load: Load, seconds: float = 5.0) -> tuple[int, int, Cost]:
    """Applies the load; returns launches that were counted, launches that are reported as lost, and the peak's cost."""
    counted, unplaced = stage.kernels()
    with stage.load(load):
        stage.until_counted(counted + unplaced + load.kernels)
        peak = stage.cost(seconds)
    now = stage.until_counted(counted + unplaced + load.kernels)
    return now[0] - counted, now[1] - unplaced, peak


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all was counted, nothing lost, series are bounded, and the agent costs no more than is aimed for."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.scale")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="N times fewer of everything (default: 1)")
    parser.add_argument("--only", choices=["counting", "footprint"], help="one of its halves (default: both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows of what enforcing costs there")
    options = parser.parse_args(arguments)
    holds = options.only == "footprint" or _counts_all(options.scale)
    if options.only != "counting":
        holds &= _costs_little(options.json)
    return 0 if holds else 1


def _costs_little(json_file: Path | None) -> bool:
    found, holds = [], True
    for size, row in zip(footprint.SIZES, footprint.rows(), strict=True):
        holds &= footprint.show(row, size)
        found.append(row)
    if json_file is not None:
        json_file.write_text(json.dumps(footprint.document(found), indent=1) + "\n")
    return holds


def _counts_all(scale: int) -> bool:
    holds = True
    with tempfile.TemporaryDirectory(prefix="gpuwarden-scale-") as folder, open_stage(Path(folder)) as stage:
        _say("before", stage.cost())
        for load in loads(scale):
            counted, unplaced, peak = run(stage, load)
            emptied = stage.until_empty()
            _say(load.name, peak)
            print(
                f"  launched {load.kernels}, counted {counted}, reported lost {unplaced}; all forgotten: {emptied}",
                flush=True,
            )
            complete = counted + unplaced == load.kernels and (not unplaced or not load.hold)
            holds &= complete and emptied and not lost_in_kernel(peak) and bounded(peak, load.containers)
        _say("after", stage.cost())
    return holds


def _say(name: str, cost: Cost) -> None:
    print(
        f"{name:<12} {cost.series} series, RSS {cost.rss_bytes / MIB:.0f} MiB, maps {cost.maps_bytes / MIB:.1f} MiB, "
        f"{cost.cpu_ratio:.1%} of a core, collecting {cost.collect_seconds * 1e3:.0f} ms, "
        f"lost {cost.lost or 'nothing'}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
