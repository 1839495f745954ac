# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The simulator beside committed results of Muri, and SJF-BSBF beside the schedulers that its paper compares it to.

- Muri's authors ran its 400 jobs on 64 GPUs and published each job's times: rounds of 360 s, Tiresias with thresholds
  at 3,250 and 7,200 GPU·s. The same settings here, and a restart of 30 s (theirs: 4–46 s by model). Nothing is fitted.
- BSBF on the same trace with the same slowdown ξ for all pairs, decisions at each event, no restart cost for SRTF: the
  best case for the baseline. On Philly: the first 600 jobs of a virtual cluster.
- A stream of 50 production and 50 opportunistic jobs: bench/fleet/stream.py.

A goal that sharing without any slowdown (ξ = 1) misses too is out of reach of the rule on that trace, and is printed as
such; it is not counted as missed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.fleet.stream import Stream, stream_rows
from fleet.model import FleetError, TraceJob
from fleet.policies import Options, build
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import summary
from fleet.simulator.slowdown import constant
from fleet.traces import read_trace

TRACES: Final = Path(__file__).parents[3] / "shared" / "traces"
_AS_MURI: Final = Setting(64, constant(1.0), gpus_per_node=8, interval_s=360.0, restart_s=30.0)
_MURI_QUEUES: Final = Options(thresholds_gpu_s=(3250.0, 7200.0))
_PHILLY: Final = (("0e4a51", 64), ("b436b2", 96))  # virtual cluster, GPUs
_PHILLY_JOBS: Final = 600


@dataclass(frozen=True, slots=True)
class Goal:
    """What a row has to reach."""

    what: str
    value: float
    least: float
    most: float
    possible: float | None = None
    """The value at ξ = 1; None: the goal does not depend on ξ"""

    @property
    def met(self) -> bool:
        return self.least <= self.value <= self.most

    @property
    def out_of_reach(self) -> bool:
        return not self.met and self.possible is not None and self.possible > self.most

    def line(self) -> str:
        """For the console."""
        word = "holds" if self.met else "out of reach" if self.out_of_reach else "MISSED"
        wanted = f"at most {self.most:.2f}" if self.least <= 0 else f"{self.least:,.0f} to {self.most:,.0f}"
        shown = f"{self.value:.3f}" if self.least <= 0 else f"{self.value:,.0f}"
        without = "" if self.possible is None else f"; without any slowdown {self.possible:.3f}"
        return f"{word}: {self.what}: {shown}, goal {wanted}{without}"


def near(what: str, value: float, published: float, ratio: float) -> Goal:
    """Within a part of a published figure."""
    return Goal(f"{what} (published {published:,.0f})", value, published * (1 - ratio), published * (1 + ratio))


@dataclass(frozen=True, slots=True)
class Case:
    """Jobs, and how they are simulated."""

    trace: str
    jobs: Sequence[TraceJob]
    setting: Setting
    how: str
    options: Options = field(default_factory=Options)

    def row(self, policy: str, factor: float = 1.0) -> dict[str, Any]:
        """The figures under a policy where any two jobs slow each other by the factor."""
        began_s = time.perf_counter()
        outcome = simulate(self.jobs, build(policy, self.options), replace(self.setting, slowdown=constant(factor)))
        seconds = time.perf_counter() - began_s
        head = {"trace": self.trace, "policy": policy, "slowdown": factor, "gpus": self.setting.gpus, "how": self.how}
        preemptions = sum(one.preemptions for one in outcome.ended)
        return {**head, **summary(outcome), "preemptions": preemptions, "seconds": round(seconds, 3)}


@dataclass(frozen=True, slots=True)
class Found:
    """Rows, and the goals that they have to reach."""

    rows: list[dict[str, Any]]
    goals: list[Goal]


def fidelity(jobs: Sequence[TraceJob]) -> Found:
    """Beside the results that Muri's authors committed (cluster_exp/results)."""
    case = Case("muri400", jobs, _AS_MURI, "rounds of 360 s, as Muri ran it", _MURI_QUEUES)
    srtf, srsf, tiresias = (case.row(policy) for policy in ("srtf", "srsf", "tiresias"))
    goals = [
        near("muri400, average JCT of srtf, s", srtf["average_jct_s"], 249_140, 0.08),
        near("muri400, makespan of srtf, s", srtf["makespan_s"], 4_156_633, 0.05),
        near("muri400, average JCT of srsf, s", srsf["average_jct_s"], 238_612, 0.08),
        near("muri400, average JCT of tiresias, s", tiresias["average_jct_s"], 336_533, 0.15),
    ]
    return Found([srtf, srsf, tiresias], goals)


def sharing_muri(jobs: Sequence[TraceJob]) -> Found:
    """BSBF beside SRTF and FFS."""
    case = Case("muri400", jobs, Setting(64, constant(1.0)), "at each event, preemption for nothing")
    alone = [case.row(policy) for policy in ("fifo", "sjf", "srtf", "tiresias")]
    shared = {(policy, factor): case.row(policy, factor) for factor in (1.0, 1.5, 2.0) for policy in ("ffs", "bsbf")}
    jct_s = {key: row["average_jct_s"] for key, row in shared.items()}
    free, srtf_s = jct_s["bsbf", 1.0], alone[2]["average_jct_s"]
    goals = [
        Goal("muri400, ξ 1.5, bsbf to srtf", jct_s["bsbf", 1.5] / srtf_s, 0, 0.75, free / srtf_s),
        Goal("muri400, ξ 1.5, bsbf to ffs", jct_s["bsbf", 1.5] / jct_s["ffs", 1.5], 0, 1.0),
        Goal("muri400, ξ 2, bsbf to ffs", jct_s["bsbf", 2.0] / jct_s["ffs", 2.0], 0, 0.85),
    ]
    return Found([*alone, *shared.values()], goals)


def sharing_philly(jobs: Sequence[TraceJob]) -> Iterator[Found]:
    """BSBF beside Tiresias on two virtual clusters."""
    for queue, gpus in _PHILLY:
        chosen = [job for job in jobs if job.queue == queue][:_PHILLY_JOBS]
        case = Case(f"philly-{queue}", chosen, Setting(gpus, constant(1.0), restart_s=30.0), "at each event")
        alone = [case.row(policy) for policy in ("tiresias", "srtf", "sjf")]
        free, ffs, bsbf, slower = case.row("bsbf"), case.row("ffs", 1.3), case.row("bsbf", 1.3), case.row("bsbf", 1.5)
        base_s = alone[0]["average_jct_s"]
        ratio, possible = bsbf["average_jct_s"] / base_s, free["average_jct_s"] / base_s
        goal = Goal(f"philly-{queue}, ξ 1.3, bsbf to tiresias", ratio, 0, 0.73, possible)
        yield Found([*alone, free, ffs, bsbf, slower], [goal])


def stream(jobs: Sequence[TraceJob]) -> Found:
    """The stream of TGS' talk, with the weights of the prior."""
    rows = list(stream_rows(jobs, Stream()))
    ratios = {row["policy"]: row for row in rows}
    goals = [
        Goal(
            "stream, opportunistic jobs, pairing to exclusive", ratios["pairing"]["opportunistic_to_exclusive"], 0, 0.48
        ),
        Goal(
            "stream, production jobs, pairing to co-execution", ratios["pairing"]["production_to_coexecution"], 0, 0.79
        ),
    ]
    return Found(rows, goals)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Of all runs."""
    made = Table("trace", "policy", "ξ", "average JCT (s)", "p99 JCT (s)", "queueing (s)", "makespan (s)", "use", "how")
    for row in rows:
        figures = (f"{row[name]:,.0f}" for name in ("average_jct_s", "p99_jct_s", "average_queueing_s", "makespan_s"))
        slowdown = "–" if row["slowdown"] is None else f"{row['slowdown']:g}"
        made.add_row(row["trace"], row["policy"], slowdown, *figures, f"{row['utilisation_ratio']:.2f}", row["how"])
    return made


def _jobs(folder: Path, file: str, name: str) -> tuple[TraceJob, ...]:
    path = folder / file
    if not path.exists():
        raise FleetError(f"not measured: {path} is missing; --traces names its folder", 3)
    return read_trace(path, name).jobs


def measured(folder: Path) -> Iterator[Found]:
    """One after the other. FleetError: a trace is missing."""
    muri = _jobs(folder, "muri400.csv", "muri")
    yield fidelity(muri)
    yield sharing_muri(muri)
    philly = _jobs(folder, "philly.csv", "philly_csv")
    yield from sharing_philly(philly)
    yield stream(philly)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when every goal within reach is met, 3 when the traces are missing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench fleet-simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help="folder with muri400.csv and philly.csv (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args(arguments)
    try:
        found = list(measured(options.traces))
    except FleetError as error:
        print(f"fleet-simulate: {error}")
        return error.exit_code
    rows = [row for part in found for row in part.rows]
    goals = [goal for part in found for goal in part.goals]
    Console(width=150).print(table(rows))
    print("\n".join(goal.line() for goal in goals))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if all(goal.met or goal.out_of_reach for goal in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
