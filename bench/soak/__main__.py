# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Hours of work: containers come and go beside those that stay, with an agent that enforces; then a day of ticks.

It holds when nothing of the agent grows (memory, descriptors, threads, maps, files, what it knows) and attribution is
as near to the truth at the end as at the beginning: medians of the first and the last quarter, after a warm-up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agent.core.errors import SetupError
from bench.soak import churn, ticks
from bench.soak.figures import compare
from tools.harness.revision import short_commit


def table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """What was looked at."""
    made = Table("figure", "first quarter", "last quarter", "least", "most", "flat", title=title)
    for row in rows:
        verdict = {True: "yes", False: "NO", None: ""}[row["flat"]]
        made.add_row(row["figure"], *(f"{row[name]:g}" for name in ("first", "last", "least", "most")), verdict)
    return made


def _looked(name: str, found: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    looks, began, printed = [], time.monotonic(), 0.0
    for look in found:
        looks.append(look)
        if (now := time.monotonic()) - printed > 30:  # progress, not each look
            printed = now
            print(
                f"soak: {now - began:6.0f} s {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in look.items()), flush=True
            )
    return looks


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200, metavar="S", help="with an agent (default %(default)g)")
    parser.add_argument(
        "--containers", type=int, default=10_000, metavar="N", help="that come and go (default %(default)s)"
    )
    parser.add_argument("--every", type=float, default=30, metavar="S", help="between two looks (default %(default)g)")
    parser.add_argument("--hours", type=float, default=24, metavar="H", help="of ticks at once (default %(default)g)")
    parser.add_argument("--seed", type=int, default=1, help="of those ticks (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures and looks there")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Exit code: 0 when nothing grew and nothing drifted."""
    options = _arguments(given)
    folder = Path(tempfile.mkdtemp(prefix="gpuwarden-soak-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all that was started is ended
    parts: dict[str, list[Mapping[str, float]]] = {}
    try:
        if options.seconds > 0:
            parts["churn"] = _looked("churn", churn.looks(folder, options.seconds, options.containers, options.every))
        if options.hours > 0:
            parts["ticks"] = _looked("ticks", ticks.looks(options.hours, options.seed))
    except SetupError as error:
        print(f"soak: {error}\nthe agent's log and the workloads' files are in {folder}", file=sys.stderr)
        return 1
    rows = {name: compare(looks) for name, looks in parts.items()}
    for name, found in rows.items():
        Console(width=120).print(table(name, found))
    flat = all(row["flat"] is not False for found in rows.values() for row in found)
    if options.json:
        report = {"commit": short_commit(), "flat": flat, "rows": rows, "looks": parts}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("soak: " + ("nothing grew" if flat else "NOT FLAT"))
    if flat:
        shutil.rmtree(folder)
    else:
        print(f"the agent's log and the workloads' files are in {folder}")
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
