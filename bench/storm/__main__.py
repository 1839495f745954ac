# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Kills, stops and starves the agent, its guardian and its backstop at random moments, and looks whether all runs on.

The agent is the real one, with offline workloads under every rung, an online service, and processes that no rule names,
on the simulated GPU. After each act it is measured from outside how long it takes until every workload runs; the
invariants are judged by what the kernel says. Root; nothing else should use the simulated GPU meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.storm.acts import WEIGHTS, plan
from bench.storm.campaign import storm
from bench.storm.figures import INVARIANTS, Outcome, holds, rows, summary, verdicts
from bench.storm.workloads import MAX_PAUSE_SECONDS
from tools.harness.revision import short_commit

_MOST_SEED: Final = 1 << 32


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The kinds of acts."""
    columns = ("act", "kills", "met standing", "p50 ms", "p99 ms", "max ms", "slow max ms", "broken")
    made = Table(*columns, title="until every workload runs, by what was done")
    for row in found:
        times = (row["p50_ms"], row["p99_ms"], row["max_ms"], row["slow_max_ms"])
        shown = ("–" if value is None else f"{value:g}" for value in times)
        made.add_row(row["act"], str(row["kills"]), str(row["met_standing"]), *shown, str(row["broken"] or ""))
    return made


def _said(seconds: float, outcome: Outcome) -> None:
    act = outcome.act
    slow = "" if outcome.slow_ms is None else f", {outcome.slow_ms:.0f} ms until all work"
    ran = "" if outcome.stood_ms is None else f", all ran after {outcome.stood_ms:.1f} ms"
    text = outcome.skipped or f"{outcome.met} stood still{ran}{slow}"
    broken = f" BROKEN: {outcome.broken}" if outcome.broken else ""
    print(
        f"{seconds:5.0f} s {act.number:4} {act.kind.name} at {act.moment} + {act.delay_seconds:.3f} s: {text}{broken}",
        flush=True,
    )


def _print(report: Mapping[str, Any]) -> None:
    Console(width=120).print(table(report["rows"]))
    for row in report["rows"]:
        buckets = ", ".join(f"≤ {most}: {count}" for most, count in row["histogram_ms"].items())
        print(f"{row['act']}: ms {buckets or 'none stood still'}")
    for goal in report["goals"]:
        verdict = {True: "reached", False: "MISSED", None: "not seen"}[goal["reached"]]
        print(f"{goal['goal']}: {goal['seen_ms']} ms, aimed at {goal['most_ms']:g}: {verdict}")
    broken = {name: report[name] for name in INVARIANTS if report[name]}
    print(f"storm: {report['kills']} kills, seed {report['seed']}: " + (f"BROKEN: {broken}" if broken else "all held"))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.storm", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="acts (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of the acts (default: another one each time; it is printed)")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[kind.name for kind in WEIGHTS],
        metavar="ACT",
        help="this kind of act alone; may be repeated: " + "; ".join(kind.name for kind in WEIGHTS),
    )
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="begin no act after so long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every invariant held, whatever the times."""
    options = _arguments(arguments)
    seed = SystemRandom().randrange(_MOST_SEED) if options.seed is None else options.seed
    print(f"storm: {options.kills} kills, seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-storm-"))
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all that was started is ended
    planned = plan(options.kills, seed, options.only)
    acts = itertools.takewhile(lambda _: time.monotonic() < began + options.seconds, planned)
    outcomes, at_end = storm(folder, acts, lambda outcome: _said(time.monotonic() - began, outcome))
    report = {
        "seed": seed,
        "commit": short_commit(),
        "seconds": round(time.monotonic() - began),
        "max_pause_ms": MAX_PAUSE_SECONDS * 1e3,
        **summary(outcomes, at_end, MAX_PAUSE_SECONDS),
        "goals": verdicts(outcomes, MAX_PAUSE_SECONDS),
        "rows": rows(outcomes),
        "broken": [{"act": one.act.number, **one.broken} for one in outcomes if one.broken],
        "left_at_end": {name: count for name, count in at_end.items() if count},
    }
    _print(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if holds(report):
        shutil.rmtree(folder)
        return 0
    print(f"the agents' logs and the workloads' files are in {folder}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
