# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The hostile set: each case, whether it is seen and contained, and what it costs the online service beside it.

A case is a phase as in `python -m bench hostile`: a fresh agent that enforces, the attacker, an online service and an
offline job that its rule slows. It is contained when each launch of the service was counted, the job was stopped for
it, and neither was refused memory or evicted; seen, when one of the names that are expected shows it.
`online_p99_ratio` is the service's p99 to that beside a program that burns as many CPUs without a call to CUDA: of one
phase each, so it is shown and not judged. Cases that have no phase are tests (bench/hostile/suites.py). Root.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agent.core.errors import WardenError
from bench.hostile.attackers import build
from bench.hostile.cases import MISSING, Case, cases
from bench.hostile.phase import Measured, Setting, open_setting
from bench.hostile.suites import SUITES, run

_MOST_SHOWN: Final = 4


class Baselines:
    """The service's p99 beside what burns CPUs, measured when it is first asked for."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._p99_s: dict[tuple[int, str, bool], float] = {}

    def p99_s(self, case: Case) -> float:
        """Of as many threads, in such a cgroup, by the same signal."""
        attacker = case.attacker
        key = attacker.busy, attacker.place, attacker.http
        if key not in self._p99_s:
            self._p99_s[key] = self._setting.phase(attacker, http=attacker.http, burning=True).p99_s
        return self._p99_s[key]


def uncontained(found: Measured) -> list[str]:
    """What of others the attacker reached."""
    reached = {
        f"{found.made - found.counted} of {found.made} launches of the service were not counted": found.counted
        != found.made,
        "the service made no launch": not found.made,
        "the job was not stopped for the service": found.stops_per_second <= 0,
        f"{found.refused} allocations or evictions of service and job": found.refused > 0,
    }
    return [what for what, is_so in reached.items() if is_so]


def measure(case: Case, setting: Setting, baselines: Baselines) -> dict[str, Any]:
    """One case's row. One that cannot be measured is not ok, and says why."""
    row = {"case": case.name, "threat": str(case.threat), "expected": case.expected}
    try:
        http = case.attacker.http
        if http not in setting.targets_ns:
            setting.set_target(http)
        baseline_s = baselines.p99_s(case)
        found = setting.phase(case.attacker, http=http)
    except (WardenError, TimeoutError) as error:
        return {**row, "seen": None, "contained": None, "online_p99_ratio": None, "ok": False, "why": str(error)[-500:]}
    reached, seen = uncontained(found), case.is_seen(found.seen)
    return {
        **row,
        "seen": seen,
        "contained": not reached,
        "online_p99_ratio": round(found.p99_s / baseline_s, 3) if baseline_s else None,
        "ok": not reached and seen is not False,
        "why": "; ".join(reached),
        "shown": dict(sorted(found.seen.items(), key=lambda one: -one[1])),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """All rows."""
    made = Table("case", "expected", "seen", "contained", "online p99", "ok", title="the hostile set")
    words = {True: "yes", False: "NO", None: "–"}
    for row in rows:
        ratio = "–" if row["online_p99_ratio"] is None else f"{row['online_p99_ratio']:.2f}"
        answers = (words[row[name]] for name in ("seen", "contained"))
        made.add_row(row["case"], row["expected"], *answers, ratio, words[row["ok"]])
    return made


def _say(row: dict[str, Any]) -> None:
    shown = ", ".join(f"{name} {count}" for name, count in list(row.get("shown", {}).items())[:_MOST_SHOWN])
    verdict = {True: "ok", False: "NOT OK", None: "skipped"}[row["ok"]]
    print(f"{row['case']}: {verdict}, p99 {row['online_p99_ratio']}; {row['why'] or shown}", flush=True)


def _measured(chosen: Sequence[Case], seconds: float) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpuwarden-hostile-") as name, open_setting(Path(name), seconds) as setting:
        build(setting.programs)
        baselines = Baselines(setting)
        for case in chosen:
            rows.append(measure(case, setting, baselines))
            _say(rows[-1])
    return rows


def _tested() -> list[dict[str, Any]]:
    rows = []
    for threat in SUITES:
        with tempfile.TemporaryDirectory() as folder:
            rows += run(threat, Path(folder))
    return rows


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.add_argument(
        "--only", type=re.compile, metavar="PATTERN", help="the measured cases whose name it is found in"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth of them, for a quick look")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each phase (default %(default)s)")
    parser.add_argument("--no-tests", action="store_true", help="leave out the cases that are tests")
    parser.add_argument("--list", action="store_true", help="list the measured cases and what is not there, and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all that was tried is ok."""
    options = _arguments(arguments)
    known = [case for case in cases() if not options.only or options.only.search(case.name)][:: options.every]
    if options.list:
        print("\n".join(f"{case.name} ({case.threat}): {case.expected}" for case in known))
        print("\n".join(f"not there: {what}: {why}" for what, why in MISSING.items()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # all that was started is ended
    rows = [*(_measured(known, options.seconds) if known else ()), *(() if options.no_tests else _tested())]
    Console(width=150).print(table(rows))
    failed = [row for row in rows if row["ok"] is False]
    for row in failed:
        print(f"{row['case']}: {row['why'] or 'not seen: ' + row['expected']}")
    by_threat = dict(Counter(row["threat"] for row in rows))
    if options.json:
        report = {"cases": len(rows), "failed": len(failed), "by_threat": by_threat, "missing": dict(MISSING)}
        options.json.write_text(json.dumps({**report, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    print(f"hostile: {len(rows) - len(failed)} of {len(rows)} cases ok: {by_threat}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
