# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench fleet-analyse`: the analysis of Philly's 82,247 jobs, its figures, time and memory.

The command runs as a user runs it, in processes of its own: the median time and the highest memory of the runs count.
The figures were computed from the same table apart from this project's code; each has to agree in every digit given.
The table is not shipped (`gpuwarden fleet formats` says how to get it): without it nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

ROOT: Final = Path(__file__).resolve().parents[2]
TRACES: Final = Path(os.environ.get("GPUWARDEN_TRACES", ROOT.parent / "shared" / "traces"))
MOST_SECONDS: Final = 5.0
MOST_MIB: Final = 200.0
_MIB: Final = 1024  # ru_maxrss counts KiB

Place = tuple[str, str, str]
"""Table, first cell of the row, column"""

FIGURES: Final[dict[Place, str]] = {
    ("whole", "jobs", "value"): "82247",
    ("whole", "queues", "value"): "15",
    ("whole", "first submission", "value"): "2017-09-04",
    ("whole", "last submission", "value"): "2017-12-22",
    ("whole", "GPU time", "value"): "978078",
    ("whole", "runtime, median", "value"): "19.1",
    ("whole", "runtime, p90", "value"): "188",
    ("whole", "runtime, p99", "value"): "70.8",
    ("whole", "longer than a week", "value"): "0.29",
    ("sizes", "1", "jobs_percent"): "93.2",
    ("sizes", "2–4", "jobs_percent"): "4.5",
    ("sizes", "5–8", "jobs_percent"): "2.0",
    ("sizes", "> 8", "jobs_percent"): "0.35",
    ("sizes", "1", "gpu_time_percent"): "18.1",
    ("sizes", "2–4", "gpu_time_percent"): "19.9",
    ("sizes", "5–8", "gpu_time_percent"): "48.4",
    ("sizes", "> 8", "gpu_time_percent"): "13.6",
    ("sizes", "1", "runtime_median_minutes"): "18.6",
    ("sizes", "2–4", "runtime_median_minutes"): "6.1",
    ("sizes", "5–8", "runtime_median_minutes"): "395",
    ("sizes", "> 8", "runtime_median_minutes"): "352",
    ("queues", "6c71a0", "gpu_time_so_far_percent"): "74",  # the fifth by GPU time
    ("hours", "hour of the day", "to_mean_ratio"): "2.09",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when it holds, 1 when not, 3 when the trace is missing."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet-analyse", description=__doc__)
    parser.add_argument(
        "--trace",
        type=Path,
        default=TRACES / "philly.csv",
        help="philly.csv (%(default)s; GPUWARDEN_TRACES: its folder)",
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of the command (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    if not options.trace.is_file():
        print(f"not measured: {options.trace} is missing; `gpuwarden fleet formats` says how to get it")
        return 3
    runs = [run(options.trace) for _ in range(options.runs)]
    found = {
        "trace": options.trace.name,
        "seconds": round(median(one["seconds"] for one in runs), 3),
        "rss_mib": round(max(one["rss_mib"] for one in runs), 1),
        "figures": list(compared(runs[0]["output"])),
    }
    wrong = [figure for figure in found["figures"] if not figure["equal"]]
    holds = not wrong and found["seconds"] <= MOST_SECONDS and found["rss_mib"] <= MOST_MIB
    Console().print(table(found))
    print(f"{len(found['figures']) - len(wrong)} of {len(found['figures'])} figures agree in every digit given")
    print(f"fleet-analyse: {'holds' if holds else 'does NOT hold'}")
    if options.json:
        options.json.write_text(json.dumps({**found, "holds": holds}, indent=1) + "\n")
    return 0 if holds else 1


def run(trace: Path) -> dict[str, Any]:
    """One run of the command, with what the kernel counted for its process."""
    command = ["-m", "fleet.command", "analyse", str(trace), "--format", "philly_csv", "--json"]
    with tempfile.TemporaryFile() as output:
        begin = time.monotonic()
        actions = [(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pid = os.posix_spawn(sys.executable, [sys.executable, *command], environment, file_actions=actions)
        _, status, usage = os.wait4(pid, 0)
        seconds = time.monotonic() - begin
        if status:
            raise SystemExit(f"`python {' '.join(command)}` failed with {os.waitstatus_to_exitcode(status)}")
        output.seek(0)
        return {"seconds": seconds, "rss_mib": usage.ru_maxrss / _MIB, "output": json.load(output)}


def compared(output: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each figure beside what the command printed, with as many digits."""
    for (name, first, column), expected in FIGURES.items():
        rows = output["tables"].get(name, {"rows": []})["rows"]
        value = next((row.get(column) for row in rows if next(iter(row.values())) == first), None)
        found = as_given(value, expected)
        yield {"what": f"{name}, {first}, {column}", "expected": expected, "found": found, "equal": found == expected}


def as_given(value: Any, expected: str) -> str | None:
    """The value with the digits of `expected`."""
    if not isinstance(value, (int, float)):
        return value if value is None else str(value)
    return f"{value:.{len(expected.partition('.')[2])}f}"


def table(found: dict[str, Any]) -> Table:
    """Figures, time and memory beside what they should be."""
    made = Table("figure", "given", "found", "", title=f"{found['trace']}, analysed", title_justify="left")
    for figure in found["figures"]:
        made.add_row(figure["what"], figure["expected"], str(figure["found"]), "=" if figure["equal"] else "DIFFERS")
    made.add_row("seconds, median", f"≤ {MOST_SECONDS:g}", f"{found['seconds']:.2f}", "")
    made.add_row("memory, MiB, most", f"≤ {MOST_MIB:g}", f"{found['rss_mib']:.0f}", "")
    return made


if __name__ == "__main__":
    sys.exit(main())
