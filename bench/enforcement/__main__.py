# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What do an online service and the work beside it get from each way of sharing a GPU? By pair and mode.

Each mode is to keep the online side's p99 near that alone and to leave the offline side as much of the rest as it can.
The marks that are to be reached are in bench/enforcement/figures.py; a round of everything takes about 50 minutes. A
figure that is quoted comes from three rounds, each with other arrivals: their median, least and most.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.core.errors import WardenError
from bench.enforcement.agent import SIGNALS
from bench.enforcement.figures import marks, over_rounds, unavailable
from bench.enforcement.modes import ALONE, NAMES, Mode, mode_of
from bench.enforcement.pairs import PAIRS, TRACE, Pair
from bench.enforcement.report import table_of, write_report
from bench.enforcement.run import Settings, arrivals_of, run_pair

REPORT = Path(__file__).parents[1] / "results" / "enforcement.md"


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measures every pair, one after another, in each round. Of several rounds each pair has one phase in each."""
    first = Settings(
        options.seconds, options.signal, options.trace, options.seed, options.isolated, not options.anywhere
    )
    pairs = [replace(pair, rounds=1) if options.rounds > 1 else pair for pair in options.pairs]
    for pair in pairs:
        arrivals_of(pair, first)  # what is wrong with a trace is to be known at once
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gpuwarden-enforcement-") as folder:
        for number in range(options.rounds):
            settings = replace(first, seed=first.seed + 2 * number)
            for pair in pairs:
                of_pair = _rows(pair, options.modes, settings, Path(folder) / str(number), console)
                rows.extend({**row, "round": number + 1, "signal": options.signal} for row in of_pair)
                if options.json:  # after each pair, so that a run that is ended early is not for nothing
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def _rows(
    pair: Pair, modes: Sequence[Mode], settings: Settings, folder: Path, console: Console
) -> list[dict[str, Any]]:
    """The pair's, at the second try if need be: one that fails costs no other one."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    reason = ""
    for number in range(2):
        try:
            return run_pair(pair, modes, settings, folder / f"{pair.name}-{number}", say)
        except WardenError as error:
            reason = " ".join(str(error).split())
            say(f"{pair.name}: {reason}")
    return [unavailable(pair.name, mode.name, reason) for mode in modes]


def _pairs(text: str) -> list[Pair]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PAIRS]:
        raise argparse.ArgumentTypeError(f"there is no pair {unknown[0]!r}; there are: {', '.join(PAIRS)}")
    return [PAIRS[name] for name in names]


def _modes(text: str) -> list[Mode]:
    try:
        modes = [mode_of(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return modes if any(mode.name == ALONE for mode in modes) else [mode_of(ALONE), *modes]


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 3600 or math.isnan(value):
        raise argparse.ArgumentTypeError("give between 1 and 3600 seconds")
    return value


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError("give between 1 and 100 rounds")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.enforcement", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--pairs", type=_pairs, default=list(PAIRS.values()), metavar="A,B", help=f"of: {', '.join(PAIRS)}"
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        default=[mode_of(name) for name in NAMES],
        metavar="X,Y",
        help=f"of: {', '.join(NAMES)}; headroom@T takes any T above 1",
    )
    parser.add_argument("--seconds", type=_seconds, default=8.0, help="measured of each phase (default %(default)s)")
    parser.add_argument("--rounds", type=_rounds, default=1, metavar="N", help="of everything (default %(default)s)")
    parser.add_argument("--signal", choices=list(SIGNALS), default="http", help="what the laws read (%(default)s)")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="CSV", help="arrivals of the pair bursts")
    parser.add_argument("--seed", type=int, default=1, help="of the other arrivals (default %(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="where the page goes (a whole run: bench/results)")
    parser.add_argument(
        "--isolated", action="store_true", help="the agent ignores others' libcuda: where others simulate GPUs too"
    )
    parser.add_argument("--anywhere", action="store_true", help="bind no process to a CPU")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 when a mark is missed."""
    options = _parser().parse_args(arguments)
    console = Console()
    console.width = max(console.width, 120)  # a log has no width of its own
    try:
        rows = measure(options, console)
    except WardenError as error:
        print(f"enforcement: {error}", file=sys.stderr)
        return error.exit_code
    whole = {row["pair"] for row in rows} == set(PAIRS) and {row["mode"] for row in rows} >= set(NAMES)
    report = options.report or (REPORT if whole else None)
    rows = over_rounds(rows)
    found = marks(rows)
    if report:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(write_report(rows, found, options.seconds, options.signal))
    console.print(table_of(rows))
    for mark in found:
        word = "not measured" if mark.met is None else "met" if mark.met else "MISSED"
        console.print(f"{word:<12} {mark.text}: {mark.found}", highlight=False, soft_wrap=True)
    return int(any(mark.met is False for mark in found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken away
    sys.exit(main())
