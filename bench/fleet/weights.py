# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench fleet-weights`: how wrong predictors are on pairs that they did not see.

- Unseen pairs: half of a table's pairs are drawn and seen, the other half predicted, and the other way round; the error
  is the mean over all pairs of |predicted − measured| throughput. Rank and ridge are chosen within the seen half. The
  table is a drawn one (its rules: bench/fleet/clusters.py), or one that was measured: `--table`.
- The prior, which needs load and gaps that such tables lack, is held against the enforcement bench's page: load and
  kernel lengths are those of its pairs, the gap is one over the rate (exact for Poisson arrivals).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.fleet.clusters import drawn_table, read
from fleet.model import FleetError, Job, Slot
from fleet.weights.factors import Cell, Factors, Settings, chosen, constant, fit, validated
from fleet.weights.physical import Physical

MOST_UNSEEN_ERROR: Final = 0.08
MOST_PRIOR_ERROR: Final = 0.05
PAGE: Final = Path(__file__).parents[1] / "results" / "enforcement.md"
_MOST_RANK: Final = 4


def _constant(cells: Sequence[Cell], seed: int) -> Factors:
    return constant(cells)


def _row_and_column(cells: Sequence[Cell], seed: int) -> Factors:
    return fit(cells, Settings(rank=0, seed=seed))


def _learned(cells: Sequence[Cell], seed: int) -> Factors:
    return fit(cells, chosen(cells, _MOST_RANK, seed)[0])


METHODS: Final = {"constant": _constant, "row + column": _row_and_column, "learned": _learned}

_SHAPE: Final = re.compile(
    r"- (?P<name>\w+) \(.*?(?P<rate>\d+) a second, leaves (?P<sm>\d+)% of the SM time and (?P<time>\d+)% of the time; "
    r"beside (?P<offline>.*)"
)


def unseen_rows(name: str, cells: Sequence[Cell], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One per method."""
    for method, fitted in METHODS.items():
        errors = [validated(cells, partial(fitted, seed=seed), seed, known=0.5) for seed in seeds]
        yield {
            "table": name,
            "pairs": len(cells),
            "method": method,
            "error": median(errors),
            "range": [min(errors), max(errors)],
            "goal": MOST_UNSEEN_ERROR if method == "learned" else None,
        }


def tables(path: Path | None, seed: int) -> Iterator[tuple[str, list[Cell]]]:
    """Name → cells, one table per GPU model."""
    sources = [("drawn", drawn_table(seed)), *([(path.name, read(path))] if path else [])]
    for name, pairs in sources:
        for model in sorted({pair.model for pair in pairs}):
            yield (
                f"{name}, {model}",
                [
                    Cell(pair.online, pair.offline, log(throughput))
                    for pair, throughput in sorted(pairs.items())
                    if pair.model == model
                ],
            )


def prior_rows(page: str, mode: str) -> Iterator[dict[str, Any]]:
    """One per pair of the enforcement bench with one offline job."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    measured = {line[0]: float(line[6]) for line in lines if len(line) == 9 and line[1] == mode}
    under_mps = set(re.findall(rf"^\| (\w+) \| {re.escape(mode)} .*MPS below", page, re.MULTILINE))
    for shape in map(_SHAPE.match, page.splitlines()):
        if shape is not None and shape["name"] in measured:
            yield _prior_row(shape, measured[shape["name"]], shape["name"] in under_mps)


def _prior_row(shape: re.Match[str], measured: float, under_mps: bool) -> dict[str, Any]:
    programs = shape["offline"].split(" and ")
    kernel_us = [float(found) for found in re.findall(r"--kernel-us ([\d.]+)", programs[0])]
    graph = [int(found) for found in re.findall(r"--graph (\d+)", programs[0])]
    row = {"pair": shape["name"], "measured": measured, "predicted": None, "error": None}
    if len(programs) > 1 or not kernel_us:
        return row  # two offline jobs on a GPU are nothing that a plan makes
    spatial = int(shape["sm"]) / 100 if under_mps else None
    slot = Slot(
        node="bench",
        gpu="simulated",
        model="simulated",
        online="online",
        load=1 - int(shape["time"]) / 100,
        gap_s=1 / int(shape["rate"]),
        slack_s=1.0,
        free_bytes=1,
        spatial=spatial,
    )
    kernel_s = kernel_us[0] * (graph[0] if graph else 1) / 1e6
    weight = Physical().weight(slot, Job(shape["name"], "offline", 0, kernel_s))
    if weight is None:
        return row
    return {**row, "predicted": weight.throughput, "error": abs(weight.throughput - measured)}


def _print(unseen: Sequence[dict[str, Any]], prior: Sequence[dict[str, Any]], mode: str) -> None:
    console = Console(width=120)
    made = Table("table", "pairs", "method", "error, median (least–most)", "goal", title="unseen pairs, half seen")
    for one in unseen:
        least, most = one["range"]
        goal = f"≤ {one['goal']:g}" if one["goal"] else ""
        figures = f"{one['error']:.3f} ({least:.3f}–{most:.3f})"
        made.add_row(one["table"], str(one["pairs"]), one["method"], figures, goal)
    console.print(made)
    made = Table("pair", "measured", "prior", "error", title=f"the prior beside the enforcement bench, {mode}")
    for one in prior:
        cells = ["–" if one[name] is None else f"{one[name]:.3f}" for name in ("predicted", "error")]
        made.add_row(one["pair"], f"{one['measured']:.2f}", *cells)
    console.print(made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all goals are reached."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet-weights", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="halvings of each table (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (default %(default)s)")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="a co-location table, GPU model → job → job → [a, b]"
    )
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="of the enforcement bench")
    parser.add_argument("--mode", default="headroom@1.5", help="its row (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.rounds)
    try:
        unseen = [row for name, cells in tables(options.table, options.seed) for row in unseen_rows(name, cells, seeds)]
    except FleetError as error:
        print(f"fleet-weights: {error}", file=sys.stderr)
        return error.exit_code
    prior = list(prior_rows(options.page.read_text(), options.mode))
    _print(unseen, prior, options.mode)
    if options.json:
        options.json.write_text(json.dumps({"unseen": unseen, "prior": prior}, indent=1, ensure_ascii=False) + "\n")
    missed = [f"{one['table']}: {one['error']:.3f}" for one in unseen if one["goal"] and one["error"] > one["goal"]]
    errors = [one["error"] for one in prior if one["error"] is not None]
    if errors:
        print(f"the prior's mean error over {len(errors)} of {len(prior)} pairs: {mean(errors):.3f}")
    if not errors or mean(errors) > MOST_PRIOR_ERROR:
        missed.append(f"the prior: mean error over {MOST_PRIOR_ERROR:g}, or nothing to hold it against")
    print("\n".join(f"not reached: {miss}" for miss in missed) or "all goals are reached")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
