# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How far from the truth is the share of a GPU that each container is said to have? By scenario and method.

Bounds for gpuwarden: 0.03 in the mean over containers, 0.08 for the worst one. A container on two GPUs counts twice.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent.errors import WardenError
from bench.attribution_agent import Agents
from bench.attribution_errors import (
    MOST_MEAN,
    MOST_WORST,
    SECONDS,
    Errors,
    Owner,
    Recording,
    by_job,
    by_tenant,
    errors,
    leak,
    true_seconds,
    unattributed,
)
from bench.attribution_run import Times, record
from bench.quiet import timed
from bench.scenarios import KINDS, Scenario, scenario

Grouping = Callable[[Recording, Mapping[Owner, float]], Mapping[Owner, float]]


def rows_of(scenario: Scenario, recording: Recording) -> list[dict[str, Any]]:
    """A row per method; jobs once more, each for itself, as `…-each`."""
    groupings: dict[str, tuple[Grouping, set[str]]] = {scenario.kind: (by_tenant, {t.name for t in scenario.tenants})}
    if any(tenant.jobs for tenant in scenario.tenants):
        groupings[f"{scenario.kind}-each"] = (by_job, {life.id for life in recording.lives})
    truth = true_seconds(recording)
    rows = []
    for name, (grouping, names) in groupings.items():
        true = grouping(recording, truth)
        for method, seconds in SECONDS.items():
            found = errors(true, grouping(recording, seconds(recording)), names)
            rows.append(_row(scenario, name, method, found, len({owner.name for owner in true}), recording))
    return rows


def _row(
    scenario: Scenario, name: str, method: str, found: Errors, containers: int, recording: Recording
) -> dict[str, Any]:
    return {
        "scenario": name,
        "method": method,
        "mean_abs_error": round(found.mean_abs, 5),
        "worst_container_error": round(found.worst, 5),
        "seed": scenario.seed,
        "containers": containers,
        "seconds": round(recording.window_ns / 1e9, 3),
    }


def misses(row: Mapping[str, Any]) -> bool:
    """Whether it is ours and not good enough."""
    return row["method"] == "gpuwarden" and not Errors(row["mean_abs_error"], row["worst_container_error"]).fits


def print_details(console: Console, scenario: Scenario, recording: Recording, pressure: float | None) -> None:
    """Everybody's share by the truth and by each method, and whether the agent's figures add up."""
    table = Table(
        "container", "GPU", "true", *SECONDS, title=f"{scenario.kind}, seed {scenario.seed}", title_justify="left"
    )
    true = by_tenant(recording, true_seconds(recording))
    methods = [by_tenant(recording, seconds(recording)) for seconds in SECONDS.values()]
    for owner in sorted({*true, *(owner for shares in methods for owner in shares)}):
        cells = [f"{shares.get(owner, 0.0):.4f}" for shares in (true, *methods)]
        table.add_row(owner.name, str(owner.device), *cells)
    console.print(table)
    for tenant in scenario.tenants:
        limit = "" if tenant.percentage is None else f" at {tenant.percentage} %"
        console.print(
            f"  {tenant.name}: {tenant.program} {' '.join(tenant.arguments)}{limit}", highlight=False, soft_wrap=True
        )
    measured = sum((d.sm_activity_ratio or 0.0) * s.interval_ns for s in recording.measured for d in s.devices)
    console.print(
        f"  {'MPS' if scenario.mps else 'time-sliced'}; device {measured / recording.window_ns:.4f} (truth "
        f"{sum(true.values()):.4f}), unattributed {unattributed(recording):.4f}, conservation off by "
        f"{leak(recording):.1e}; {'?' if pressure is None else f'{pressure:.0%}'} of the time somebody waited for a CPU"
    )


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """All rows."""
    table = Table("scenario", "method", "mean error", "worst", "containers", "seed", "")
    for row in rows:
        table.add_row(
            row["scenario"],
            row["method"],
            f"{row['mean_abs_error']:.4f}",
            f"{row['worst_container_error']:.4f}",
            str(row["containers"]),
            str(row["seed"]),
            "misses" if misses(row) else "",
            end_section=row["method"] == "equal_split",
        )
    return table


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every scenario, one after another."""
    rows: list[dict[str, Any]] = []
    times = Times(options.warm_up, options.seconds)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-attribution-") as folder, Agents() as agents:
        for seed in range(options.seed, options.seed + options.repeat):
            for kind in options.scenarios:
                one = scenario(kind, seed)
                place = Path(folder) / f"{kind}-{seed}"
                recording, pressure = timed(partial(record, one, times, place, agents))
                rows.extend(rows_of(one, recording))
                for row in rows[-3:]:
                    console.print(
                        f"{row['scenario']:<18} {row['method']:<12} mean {row['mean_abs_error']:.4f}  "
                        f"worst {row['worst_container_error']:.4f}",
                        highlight=False,
                    )
                if options.verbose:
                    print_details(console, one, recording, pressure)
    return rows


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are: {', '.join(KINDS)}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.attribution", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the scenarios (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="so many seeds, one after another (default %(default)s)")
    parser.add_argument("--scenarios", type=_kinds, default=list(KINDS), metavar="A,B", help=f"of: {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured of each (default %(default)s)")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("-v", "--verbose", action="store_true", help="show everybody's share, and the workloads")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when gpuwarden misses its bounds in any scenario."""
    options = _parser().parse_args(arguments)
    console = Console()
    console.width = max(console.width, 100)  # a log has no width of its own
    try:
        rows = measure(options, console)
    except WardenError as error:
        print(f"attribution: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table_of(rows))
    missed = sorted({row["scenario"] for row in rows if misses(row)})
    bounds = f"mean {MOST_MEAN}, worst {MOST_WORST}"
    print(f"attribution: {f'misses ({bounds}): ' + ', '.join(missed) if missed else f'everywhere within {bounds}'}")
    return 1 if missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken away
    sys.exit(main())
