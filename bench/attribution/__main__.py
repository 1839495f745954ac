# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How far from the truth is the share of a GPU that each container is reported to have? By scenario and method.

Bounds for gpuwarden: 0.03 in the mean over containers, 0.08 for the worst one. A container on two GPUs counts twice.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.core.errors import WardenError
from bench.attribution.agent import Agents
from bench.attribution.errors import MOST_MEAN, MOST_WORST, misses, rows_of
from bench.attribution.run import Times, record
from bench.attribution.scenarios import ASKED_FOR, KINDS, scenario
from bench.attribution.table import print_details, print_errors, summary_of, table_of
from tools.harness.quiet import timed


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Runs every scenario, one after another."""
    rows: list[dict[str, Any]] = []
    times = Times(options.warm_up, options.seconds)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-attribution-") as folder, Agents(options.isolated) as agents:
        for seed in range(options.seed, options.seed + options.repeat):
            for kind in options.scenarios:
                one = scenario(kind, seed)
                place = Path(folder) / f"{kind}-{seed}"
                recording, pressure = timed(partial(record, one, times, place, agents))
                found = rows_of(one, recording)
                rows.extend(found)
                print_errors(console, found, recording)
                if options.verbose:
                    print_details(console, one, recording, pressure)
    return rows


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are: {', '.join(KINDS)}")
    return kinds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.attribution", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the scenarios (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="so many seeds, one after another (default %(default)s)")
    usual = [kind for kind in KINDS if kind not in ASKED_FOR]
    of = f"of: {', '.join(usual)}; and by name only: {', '.join(ASKED_FOR)}"
    parser.add_argument("--scenarios", type=_kinds, default=usual, metavar="A,B", help=of)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured of each (default %(default)s)")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds before (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--isolated", action="store_true", help="the agent ignores others' libcuda: where others simulate GPUs too"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show each container's share, and the workloads")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 when gpuwarden misses its bounds in any scenario."""
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
    if options.repeat > 1:
        console.print(summary_of(rows))
    missed = sorted({row["scenario"] for row in rows if misses(row)})
    bounds = f"mean {MOST_MEAN}, worst {MOST_WORST}"
    print(f"attribution: {f'misses ({bounds}): ' + ', '.join(missed) if missed else f'everywhere within {bounds}'}")
    return 1 if missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken away
    sys.exit(main())
