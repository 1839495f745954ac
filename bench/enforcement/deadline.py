# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench deadline`: periodic tasks on one simulated GPU, more and more of them, with turns and without.

Requests take about 10 ms of the GPU. Three tasks have a short deadline and stay; tasks with a long one are added.
Without turns the GPU's time slices give each request that is under way the same, whatever its deadline. Each task is a
program of its own, whose first request comes at a time of its own. A request is late if it ends later than its deadline
after the time at which it was to begin, by the program's own clock: whatever delays it counts, the host too. The load
is what the agent says of the GPU while all tasks run; up to 1 it promises that none is late.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from agent.core.errors import SetupError
from bench.enforcement.agent import Agent, agent
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.quiet import Stolen
from tools.harness.stage import Cpus, Stage, Workload, open_stage

PUBLISHED: Final = "SGPRS, published (its own GPU and tasks): no miss up to 23 of 30 tasks, 14.8 % of requests at 24"
_SETTLE_SECONDS: Final = 6.0  # until the agent knows all tasks; what it measures then, it goes by for ten seconds
_DRAIN_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of task. Its kernels fill the GPU."""

    name: str
    kernels: int
    kernel_us: int
    period_ms: int
    deadline_ms: int

    def arguments(self, seed: int, seconds: float, log: Path) -> list[str]:
        """Of the program `online`."""
        work = ["--kernels", str(self.kernels), "--kernel-us", str(self.kernel_us), "--iterations-per-us", "100"]
        times = ["--period-ms", str(self.period_ms), "--seed", str(seed), "--seconds", str(seconds)]
        return [*work, *times, "--drain-seconds", str(_DRAIN_SECONDS), "--log", str(log)]


SHORT: Final = Kind("short", 20, 500, 90, 45)
LONG: Final = Kind("long", 20, 500, 300, 300)
KINDS: Final = (SHORT, LONG)
SHORT_TASKS: Final = 3


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The policy of a phase."""

    def text(self, path: str, enforce: bool = True) -> str:
        """Its YAML."""
        rules = "".join(
            f'  - {{name: {kind.name}, match: {{cgroup: "{path}/{kind.name}/*"}}, period: {kind.period_ms}ms, '
            f"deadline: {kind.deadline_ms}ms}}\n"
            for kind in KINDS
        )
        return f"version: 1\nenforce: {'true' if enforce else 'false'}\nperiodic:\n{rules}"


@dataclass(frozen=True, slots=True)
class Round:
    """What one phase showed."""

    tasks: int
    turns: bool
    requests: int
    late: int
    worst_late_ms: float
    load: float | None  # by the agent; None: unknown
    stolen_ratio: float | None

    @property
    def late_ratio(self) -> float:
        return self.late / self.requests


def measure(stage: Stage[Node], warden: Agent, long_tasks: int, seconds: float, turns: bool) -> Round:
    """So many long tasks beside the short ones."""
    if refused := warden.take(Deadlines(), enforce=turns):
        raise SetupError(f"the agent does not take the policy: {refused}")
    kinds = [SHORT] * SHORT_TASKS + [LONG] * long_tasks
    started = [_start(stage, kind, number, seconds) for number, kind in enumerate(kinds)]
    for workload, _, _ in started:
        stage.go(workload)
    time.sleep(_SETTLE_SECONDS)
    stolen = Stolen.now()
    time.sleep(seconds - 1)
    load = _load(warden)  # while all of them run
    time.sleep(1)
    stolen_ratio = stolen.ratio()
    for workload, _, _ in started:
        if not workload.wait(_DRAIN_SECONDS + 10):
            raise SetupError("a task did not end: see the agent's log")
    late_ms = [late for _, kind, log in started for late in _lateness_ms(kind, log)]
    stage.end()
    late = [one for one in late_ms if one > 0]
    return Round(len(kinds), turns, len(late_ms), len(late), max(late, default=0.0), load, stolen_ratio)


def _start(stage: Stage[Node], kind: Kind, number: int, seconds: float) -> tuple[Workload, Kind, Path]:
    log = stage.folder / f"{kind.name}-{number}.log"
    log.unlink(missing_ok=True)
    arguments = kind.arguments(1 + number, _SETTLE_SECONDS + seconds, log)
    workload = stage.run(kind.name, [str(BUILD / "bin" / "online"), *arguments])
    stage.cpus.bind(workload.process.pid, online=True)
    _prefer(workload.process.pid)
    return workload, kind, log


def _prefer(process: int) -> None:
    """Real-time priority, as such programs have: one that waits for a CPU is late whatever the GPU does."""
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


def _lateness_ms(kind: Kind, log: Path) -> list[float]:
    """Of each request that was to begin while it was measured, how much later than its deadline it ended."""
    rows = [line.split() for line in log.read_text().splitlines()]
    return [float(row[1]) * 1e3 - kind.deadline_ms for row in rows if float(row[0]) >= _SETTLE_SECONDS]


def _load(warden: Agent) -> float | None:
    snapshot = warden.snapshot()
    found = [one.periodic for one in snapshot.enforcement.values() if one.periodic] if snapshot else []
    loads = [one.load_ratio for one in found]
    known = [load for load in loads if load is not None]
    return max(known) if known and len(known) == len(loads) else None


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Rounds of the same number of tasks in the same way: minimum, median and maximum."""
    ratios, loads = [one.late_ratio for one in rounds], [one.load for one in rounds if one.load is not None]
    stolen = [one.stolen_ratio for one in rounds if one.stolen_ratio is not None]
    return {
        "tasks": rounds[0].tasks,
        "turns": rounds[0].turns,
        "rounds": len(rounds),
        "requests": sum(one.requests for one in rounds),
        "late_ratio": [round(one, 5) for one in (min(ratios), statistics.median(ratios), max(ratios))],
        "worst_late_ms": round(max(one.worst_late_ms for one in rounds), 3),
        "load": [round(one, 3) for one in (min(loads), statistics.median(loads), max(loads))] if loads else None,
        "stolen_ratio": round(max(stolen), 4) if stolen else None,
    }


def misses_admitted(rounds: Sequence[Round]) -> int:
    """Late requests in rounds that the agent had admitted."""
    return sum(one.late for one in rounds if one.turns and one.load is not None and one.load <= 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: no deadline was missed where the agent promised so, and some number of tasks was beyond that."""
    parser = argparse.ArgumentParser(prog="python -m bench deadline", description=__doc__)
    parser.add_argument("--long", type=int, nargs="+", default=[0, 3, 6, 8, 10, 14], help="tasks with a long deadline")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="that a round is measured (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    rounds = _all_rounds(options.long, options.rounds, options.seconds)
    rows = [
        summary([one for one in rounds if (one.tasks, one.turns) == (SHORT_TASKS + count, turns)])
        for count in options.long
        for turns in (False, True)
    ]
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "published": PUBLISHED}, indent=1) + "\n")
    missed, promised = misses_admitted(rounds), [one for one in rounds if one.turns and one.load and one.load <= 1]
    print(f"deadline: {missed} misses in {sum(one.requests for one in promised)} requests that were admitted")
    return 0 if promised and not missed and any(one.load and one.load > 1 for one in rounds if one.turns) else 1


def _all_rounds(long_tasks: Sequence[int], rounds: int, seconds: float) -> list[Round]:
    """With turns and without by turns, so that whatever changes on the machine meets both."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-deadline-") as name:
        folder, cpus = Path(name), Cpus.split()
        with simulated_node(folder / "gpu") as node, open_stage(node, folder, cpus) as stage:
            cpus.bind(node.server_tgid, online=True)
            with agent(stage, Deadlines(), isolated=True) as warden:
                found = []
                for _ in range(rounds):
                    for count in long_tasks:
                        for turns in (False, True):
                            found.append(measure(stage, warden, count, seconds, turns))
                            print(f"deadline: {found[-1]}", flush=True)
                return found


def _print(rows: Sequence[dict[str, Any]]) -> None:
    made = Table(*rows[0], title="Requests later than their deadline (min, median, max of rounds)")
    for row in rows:
        made.add_row(*("–" if value is None else str(value) for value in row.values()))
    Console(width=140).print(made)
    print(PUBLISHED)


if __name__ == "__main__":
    sys.exit(main())
