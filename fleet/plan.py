# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet plan`: which waiting job would go where now, and what that is worth. It acts on nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from fleet.extender.reservations import holder
from fleet.match.plan import Plan, solve
from fleet.model import FleetError, Job, Predictor, Slot, printable
from fleet.sources import pods
from fleet.sources.pods import Waiting, quantity, seconds
from fleet.sources.prometheus import Found, Settings, find_slots, prometheus
from fleet.weights import BUILTIN
from fleet.weights.physical import Physical
from fleet.weights.table import Read, Table
from fleet.weights.table import parse as parse_table

SCHEMA: Final = "gpuwarden.fleet-plan/1"
_T = TypeVar("_T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden fleet plan`."""
    add = parser.add_argument
    add("--prometheus", required=True, metavar="URL", help="server that scrapes the agents, such as http://host:9090")
    add(
        "--pods",
        required=True,
        metavar="FILE",
        help="output of `kubectl get pods -A -o json`, or - for standard input: pods whose schedulerName is gpuwarden "
        "and that wait are the jobs",
    )
    add_prediction_arguments(parser)
    add("--json", action="store_true", help="write one JSON document")


def add_prediction_arguments(parser: argparse.ArgumentParser) -> None:
    """What pairs are expected to give, and what counts as free."""
    add = parser.add_argument
    add("--predictor", choices=tuple(BUILTIN), default="physical", help="what expects a pair's throughput")
    add("--table", metavar="FILE", help="measured pairs, for the predictors table and learned")
    add("--reserve", default="1GiB", metavar="SIZE", help="memory that stays free on each GPU (default: %(default)s)")
    add(
        "--assume-kernel",
        metavar="TIME",
        help="kernel length of jobs without the annotation gpuwarden.io/kernel, such as 2ms; without it they get GPUs "
        "without an online service only",
    )
    add("--window", default="15m", help="means and maxima are over this time (default: %(default)s)")
    add("--stale", default="60s", metavar="TIME", help="age from which an agent's figures count as none (%(default)s)")


@dataclass(frozen=True, slots=True)
class Result:
    """The plan, with what was left out of it on the way."""

    plan: Plan
    found: Found
    waiting: Waiting
    dropped: Counter[str]
    """Reason → rows of the table of pairs"""

    @property
    def unplaced(self) -> tuple[Job, ...]:
        placed = {one.job.key for one in self.plan.placed}
        return tuple(job for job in self.waiting.jobs if job.key not in placed)


def act(options: argparse.Namespace) -> int:
    """Exit code: 0, also where no job could be placed."""
    predictor, dropped = given_predictor(options)
    settings = given_settings(options)
    documents = pods.documents(_read(options.pods))
    listed = pods.waiting(documents)
    found = find_slots(prometheus(options.prometheus), settings)
    result = Result(solve(free_slots(found.slots, documents), listed.jobs, predictor), found, listed, dropped)
    if options.json:
        print(json.dumps(document(result), indent=1, allow_nan=False))
    else:
        _show(result, Console(width=None if sys.stdout.isatty() else 180))
    return 0


def free_slots(slots: Iterable[Slot], documents: Iterable[Any]) -> tuple[Slot, ...]:
    """Those that no pod has: one that was bound a moment ago does not work yet, so no agent sees it."""
    held = {one.gpu for one in map(holder, documents) if one is not None and not one.finished}
    return tuple(slot for slot in slots if slot.gpu not in held)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{name} cannot be read: {error}") from error


def at_least(value_s: float, least_s: float, option: str) -> float:
    """Of a time that an option gives."""
    if value_s < least_s:
        raise FleetError(f"{option}: write {least_s:g}s or more")
    return value_s


def given(value: _T | None, option: str, example: str) -> _T:
    """The option's value, if it was understood."""
    if value is None:
        raise FleetError(f"{option}: not understood; write it as {example}")
    return value


def given_settings(options: argparse.Namespace) -> Settings:
    """What counts as fresh."""
    return Settings(options.window, given(seconds(options.stale), "--stale", "60s"))


def given_table(options: argparse.Namespace) -> Read:
    """Of measured pairs; empty without a file."""
    assumed = options.assume_kernel
    kernel_s = None if assumed is None else given(seconds(assumed), "--assume-kernel", "2ms")
    prior = Physical(given(quantity(options.reserve), "--reserve", "1GiB"), kernel_s)
    return parse_table(_read(options.table), prior) if options.table else Read(Table({}, prior), Counter())


def given_predictor(options: argparse.Namespace) -> tuple[Predictor, Counter[str]]:
    """With the rows of the table that hold no pair."""
    if options.table is None and options.predictor != "physical":
        raise FleetError(f"--predictor {options.predictor} needs measured pairs: give --table FILE")
    read = given_table(options)
    return BUILTIN[options.predictor](read.table), read.dropped


def document(result: Result) -> dict[str, Any]:
    """What --json writes."""
    plan = result.plan
    return {
        "schema": SCHEMA,
        "predictor": plan.predictor,
        "pairs": [
            {
                "job": one.job.key,
                "kind": one.job.kind,
                "node": one.slot.node,
                "gpu": one.slot.gpu,
                "online": one.slot.online,
                "expected_throughput": one.weight.throughput,
                "error": one.weight.error,
                "why": one.weight.why,
            }
            for one in plan.placed
        ],
        "waiting": [job.key for job in result.unplaced],
        "slots": len(plan.slots),
        "no_slots": dict(result.found.unknown),
        "refused_pods": dict(result.waiting.refused),
        "left_out": dict(plan.left_out),
        "dropped_rows": dict(result.dropped),
        "expected_throughput": plan.throughput,
        "error": plan.error,
        "value": plan.value,
        "bound": plan.bound,
        "gap_ratio": plan.gap_ratio,
        "gain": {name: plan.gain(name) for name in plan.baselines},
    }


def _show(result: Result, console: Console) -> None:
    plan = result.plan
    table = Grid("JOB", "NODE", "GPU", "BESIDE", "EXPECTED", "WHY", box=None, pad_edge=False)
    for one in plan.placed:
        expected = f"{one.weight.throughput:.2f} ± {one.weight.error:.2f}"
        cells = (one.job.key, one.slot.node, one.slot.gpu, one.slot.online or "–", expected, one.weight.why)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    if plan.placed:
        console.print(table)
        console.print()
    for line in _lines(result):
        console.print(Text(printable(line)))


def _lines(result: Result) -> list[str]:
    plan = result.plan
    lines = [
        f"{len(plan.placed)} of {len(result.waiting.jobs)} waiting jobs have a GPU, of {len(plan.slots)} that have "
        "room; EXPECTED is a job's throughput to alone",
    ]
    if plan.placed:
        total = f"{plan.throughput:.2f} ± {plan.error:.2f} jobs alone on a GPU"
        gains = ", ".join(f"{name.replace('_', ' ')} × {_gain(plan, name)}" for name in plan.baselines)
        lines.append(f"expected in all: {total}; no plan is worth over {plan.bound:.2f}, this one {plan.value:.2f}")
        lines.append(f"to other ways of placing them: {gains}")
        if plan.any_order_is_as_good:
            lines.append("any order is as good here: the weights only add up, or there are too few types")
    left_out: Sequence[tuple[str, Mapping[str, int]]] = (
        ("GPUs without room", result.found.unknown),
        ("pods refused", result.waiting.refused),
        ("left out", plan.left_out),
        ("rows of the table dropped", result.dropped),
    )
    for what, reasons in left_out:
        lines += [f"{what}: {count} × {reason}" for reason, count in sorted(reasons.items())]
    return lines


def _gain(plan: Plan, name: str) -> str:
    gain = plan.gain(name)
    return "∞ (it places none)" if gain is None else f"{gain:.3f}"
