# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Attribution's errors and shares on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.attribution.errors import leak, misses, strangers, unattributed
from bench.attribution.recording import Recording
from bench.attribution.scenarios import Scenario
from bench.attribution.shares import SECONDS, by_tenant, true_seconds

_TOLERABLE = 0.003


def print_details(console: Console, scenario: Scenario, recording: Recording, pressure: float | None) -> None:
    """Each container's share by the truth and by each method, and whether the agent's figures add up."""
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
        f"{leak(recording):.1e}; {'?' if pressure is None else f'{pressure:.0%}'} of the time a task waited for a CPU"
    )


def print_errors(console: Console, rows: Sequence[Mapping[str, Any]], recording: Recording) -> None:
    """A line per row as soon as it is known, and whether it can be trusted."""
    for row in rows:
        errors = f"mean {row['mean_abs_error']:.4f}  worst {row['worst_container_error']:.4f}{_bounds_of(row)}"
        console.print(f"{row['scenario']:<18} {row['method']:<12} {errors}", highlight=False)
    if (share := strangers(recording)) > _TOLERABLE:
        console.print(
            f"  the agent gave {share:.4f} of the device to others: another user of this machine runs programs on a "
            "simulated GPU, and they look like ours. Measure again when they have ended, or with --isolated.",
            style="yellow",
            highlight=False,
        )


def _bounds_of(row: Mapping[str, Any]) -> str:
    if row.get("covered_ratio") is None:
        return ""
    covered, bound, rest = row["covered_ratio"], row["mean_bound_ratio"], row["unattributed_error"]
    return f"  within its error {covered:.0%} of the ticks (± {bound:.3f}), unattributed off by {rest:.4f}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of all rows, for a terminal."""
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


def summary_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """All seeds of a scenario and method in a line: the mean of the means, and the worst of the worst."""
    table = Table("scenario", "method", "mean error", "worst", "seeds", "missed")
    names = dict.fromkeys((row["scenario"], row["method"]) for row in rows)
    for scenario_name, method in names:
        mine = [row for row in rows if (row["scenario"], row["method"]) == (scenario_name, method)]
        mean = sum(row["mean_abs_error"] for row in mine) / len(mine)
        worst = max(row["worst_container_error"] for row in mine)
        missed = ", ".join(f"seed {row['seed']}" for row in mine if misses(row))
        table.add_row(
            scenario_name,
            method,
            f"{mean:.4f}",
            f"{worst:.4f}",
            str(len(mine)),
            missed,
            end_section=method == "equal_split",
        )
    return table
