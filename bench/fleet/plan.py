# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench fleet-plan`: how long a plan takes, how far it is from the optimum, and what it gains.

Each round draws a cluster from its own seed and plans it in a fresh process, whose peak memory is its own. At 1,000
slots and jobs the dense assignment problem is solved beside it, over slots and jobs as they are. Judged: see GOALS; the
gain over first fit and over greedy has to be at least .99 of what the optimum gains over them, on tables (where the
optimum gains a thousandth at least). Where seconds are many more than CPU seconds, the machine had other work.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.fleet.clusters import Cluster, drawn_table, of_loads, of_table, read
from fleet.model import FleetError, throughput_rows

GOALS: Final = {  # figure → the most, or the least, that it may be in the median of the rounds
    "seconds": (None, 2.0),
    "transport_seconds": (None, 0.3),
    "rss_mib": (None, 300.0),
    "certified_ratio": (0.99, None),
    "to_dense_ratio": (0.999, None),
    "of_gain_over_first_fit": (0.99, None),
    "of_gain_over_greedy": (0.99, None),
}
DENSE_AT: Final = 1000
"""Slots and jobs: ten times as many take minutes and 800 MB"""
_LEAST_GAIN: Final = 1e-3
_FIGURES: Final = (*GOALS, "cpu_seconds", "dense_seconds", "gain_over_first_fit", "gain_over_greedy")


@dataclass(frozen=True, slots=True)
class Case:
    """One round of one row."""

    scenario: str
    """kinds, loads or the path of a table"""
    count: int
    seed: int

    def cluster(self) -> Cluster:
        if self.scenario == "loads":
            return of_loads(self.count, self.seed)
        pairs = drawn_table(self.seed) if self.scenario == "kinds" else read(Path(self.scenario))
        return of_table(pairs, self.count, self.seed)


def measure(case: Case) -> dict[str, Any]:
    """Runs in its own process."""
    import numpy as np
    import scipy.optimize  # noqa: F401 - the service has it loaded; what that costs is no part of a plan

    from fleet.match.plan import solve
    from fleet.match.transport import transport

    cluster = case.cluster()
    start, cpu_start = time.perf_counter(), time.process_time()
    plan = solve(cluster.slots, cluster.jobs, cluster.predictor)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    rss_mib = _peak_mib()
    weights = [[np.nan if weight is None else weight for weight in one.weights] for one in plan.slot_types]
    worth = np.array(weights) * np.array([one.job.value for one in plan.job_types])
    sizes = [[len(one.members) for one in side] for side in (plan.slot_types, plan.job_types)]
    start = time.perf_counter()
    transport(worth, *sizes)
    transport_seconds = time.perf_counter() - start
    found = {
        "types": [len(plan.slot_types), len(plan.job_types)],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "transport_seconds": transport_seconds,
        "rss_mib": rss_mib,
        "certified_ratio": 1 - plan.gap_ratio,
        "gain_over_first_fit": plan.gain("first_fit"),
        "gain_over_greedy": plan.gain("greedy"),
    }
    return found if case.count > DENSE_AT else {**found, **_dense(case, cluster, plan)}


def _peak_mib() -> float:
    """Of this process's memory; the kernel's rusage would begin with that of the process that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise FleetError("no VmHWM in /proc/self/status: run the bench on Linux with /proc", 3)
    return int(found[1]) / 1024


def _dense(case: Case, cluster: Cluster, plan: Any) -> dict[str, Any]:
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    weights = np.array(list(throughput_rows(cluster.predictor, cluster.slots, cluster.jobs)), dtype=float)
    start = time.perf_counter()
    worth = np.nan_to_num(weights, nan=0.0) * np.array([job.value for job in cluster.jobs])
    optimum = float(worth[linear_sum_assignment(worth, maximize=True)].sum())
    found: dict[str, Any] = {
        "dense_seconds": time.perf_counter() - start,
        "to_dense_ratio": plan.value / optimum,
    }
    for name in ("first_fit", "greedy"):
        possible = optimum - plan.baselines[name]
        tells = case.scenario != "loads" and possible > _LEAST_GAIN * optimum
        found[f"of_gain_over_{name}"] = (plan.value - plan.baselines[name]) / possible if tells else None
    return found


def row(scenario: str, count: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Medians of the rounds, with least and most; what was not measured, or tells nothing, is null."""
    rounds = []
    for seed in seeds:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
            rounds.append(pool.submit(measure, Case(scenario, count, seed)).result())
    figures = {name: [found[name] for found in rounds if found.get(name) is not None] for name in _FIGURES}
    return {
        "scenario": Path(scenario).name,
        "n": count,
        "types": max(found["types"] for found in rounds),
        **{name: median(values) if values else None for name, values in figures.items()},
        "range": {name: [min(values), max(values)] for name, values in figures.items() if values},
        "seeds": list(seeds),
    }


def misses(one: dict[str, Any]) -> list[str]:
    """Goals that the row does not reach."""
    found = []
    for name, (least, most) in GOALS.items():
        value = one[name]
        if value is not None and ((least is not None and value < least) or (most is not None and value > most)):
            found.append(f"{one['scenario']}, {one['n']}: {name} {value:.4g}, goal {least or most:g}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Of all rows."""
    titles = ("table", "n", "types", *(name.replace("_", " ") for name in _FIGURES))
    made = Table(*titles, title="plan: median (least–most) of the rounds")
    for one in rows:
        cells = [_cell(one, name) for name in _FIGURES]
        made.add_row(one["scenario"], f"{one['n']:,}", " × ".join(map(str, one["types"])), *cells)
    return made


def _cell(one: dict[str, Any], name: str) -> str:
    if one[name] is None:
        return "–"
    least, most = one["range"][name]
    return f"{one[name]:.4g} ({least:.4g}–{most:.4g})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all goals are reached."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet-plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="at least 3 (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first round (default %(default)s)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1000, 10000], help="slots, and jobs (default 1000 10000)"
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="a co-location table, GPU model → job → job → [a, b]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    if options.rounds < 3:
        parser.error("--rounds: less than 3 say nothing of the spread")
    scenarios = ["kinds", "loads", *([str(options.table)] if options.table else [])]
    seeds = range(options.seed, options.seed + options.rounds)
    try:
        rows = [row(scenario, count, seeds) for scenario in scenarios for count in options.sizes]
    except FleetError as error:
        print(f"fleet-plan: {error}", file=sys.stderr)
        return error.exit_code
    Console(width=220).print(table(rows))
    print("published: MuxFlow's matching of several thousand workloads by Kuhn–Munkres takes minutes")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    missed = [miss for one in rows for miss in misses(one)]
    print("\n".join(f"not reached: {miss}" for miss in missed) or "all goals are reached")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
