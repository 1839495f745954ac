# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet simulate TRACE`: what each policy would have made of a trace, on a cluster that is given in numbers.

All policies get the same jobs, cluster and slowdowns. The first one named is what the others are compared to.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fleet.model import FleetError, Predictor, TraceJob
from fleet.policies import BUILTIN, Options, build
from fleet.policies.tiresias import THRESHOLDS_GPU_S
from fleet.simulator import picture
from fleet.simulator.cluster import Slowdown
from fleet.simulator.engine import Progress as Report
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import Outcome, summary
from fleet.simulator.services import Services, read_services
from fleet.simulator.slowdown import by_resources, constant, read_table
from fleet.traces import FORMATS, read_trace
from fleet.weights import BUILTIN as PREDICTORS
from fleet.weights.table import Table as Pairs
from fleet.weights.table import parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, the cluster, the policies, and what to write."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file with the jobs")
    parser.add_argument("--format", required=True, choices=list(FORMATS), help="of the trace")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of the cluster")
    parser.add_argument(
        "--policies", type=_names, default=["srtf", "tiresias", "ffs", "bsbf"], metavar="NAME,…",
        help=f"of {', '.join(BUILTIN)}; the first is what the others are compared to (default: srtf,tiresias,ffs,bsbf)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw how JCT and queueing are distributed")
    _add_cluster(parser.add_argument_group("cluster"))
    _add_services(parser.add_argument_group("online services, beside which one-GPU jobs of the trace may run"))
    _add_selection(parser.add_argument_group("part of the trace"))


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpus-per-node", type=int, metavar="M", help="a job then lies on as few nodes as can hold it")
    group.add_argument(
        "--slowdown",
        default="1.5",
        metavar="X|TABLE.json|muri",
        help="of two jobs on a GPU, unless there are services: a factor; a file of measured pairs; or muri, for the "
        "trace's times by resource (default: %(default)s)",
    )
    group.add_argument("--gpu-type", metavar="TYPE", help="of the table, where it has several")
    group.add_argument("--interval", type=float, metavar="SECONDS", help="between decisions (default: at each event)")
    group.add_argument(
        "--restart", type=float, default=30.0, metavar="SECONDS", help="lost by each preemption (default: %(default)s)"
    )
    group.add_argument(
        "--thresholds", type=_numbers, default=list(THRESHOLDS_GPU_S), metavar="GPU_S,…",
        help="between tiresias' queues (default: 3600)",
    )  # fmt: skip


def _add_services(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--services", type=Path, metavar="FILE.json", help="services that hold GPUs, and kinds of jobs")
    group.add_argument("--predictor", choices=list(PREDICTORS), default="physical", help="(default: %(default)s)")
    group.add_argument("--pairs", type=Path, metavar="FILE.json", help="measured pairs, for table and learned")


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--queue", metavar="NAME", help="only jobs of this queue or virtual cluster")
    group.add_argument("--first", type=int, metavar="N", help="only the first N of them")
    group.add_argument("--sample", type=float, metavar="RATIO", help="only this part of them, drawn at random")
    group.add_argument("--seed", type=int, default=0, help="of --sample (default: %(default)s)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in _names(text)]


def selected(jobs: Sequence[TraceJob], queue: str | None, first: int | None) -> list[TraceJob]:
    """The first jobs of a queue. FleetError: there are none."""
    found = [job for job in jobs if queue is None or job.queue == queue][: first if first is None else max(0, first)]
    if not found:
        raise FleetError(f"the trace has no job{f' of the queue {queue!r}' if queue else ''}")
    return found


def sampled(jobs: Sequence[TraceJob], ratio: float, seed: int) -> list[TraceJob]:
    """Each job with this probability, in the same order. FleetError: none is left, or it is no probability."""
    if not 0 < ratio <= 1:
        raise FleetError(f"--sample {ratio:g}: give a part of all jobs, over 0 and at most 1")
    draw = random.Random(seed)
    found = [job for job in jobs if draw.random() < ratio]
    if not found:
        raise FleetError(f"--sample {ratio:g} left no job of {len(jobs)}: give a larger part or another --seed")
    return found


def slowdown_of(text: str, gpu_type: str | None) -> Slowdown:
    """FleetError: it is neither a factor, nor a table, nor muri."""
    if text == "muri":
        return by_resources
    try:
        return constant(float(text))
    except ValueError:
        return read_table(Path(text), gpu_type)


def predictor_of(name: str, pairs: Path | None) -> Predictor:
    """FleetError: the file with measured pairs is missing or holds none."""
    if pairs is None:
        return PREDICTORS[name](Pairs({}))
    try:
        return PREDICTORS[name](parse(pairs.read_text(encoding="utf-8")).table)
    except (OSError, UnicodeError) as error:
        raise FleetError(f"cannot read the measured pairs {pairs}: {error}") from error


def act(options: argparse.Namespace) -> int:
    """Exit code: 0."""
    if options.picture:
        picture.check()
    policies = Options(thresholds_gpu_s=tuple(options.thresholds))
    for name in options.policies:
        build(name, policies)  # a wrong name is found before the first simulation
    services = None if options.services is None else read_services(options.services)
    setting = _setting(options, services)
    trace = read_trace(options.trace, options.format)
    jobs = selected(trace.jobs, options.queue, options.first)
    jobs = jobs if options.sample is None else sampled(jobs, options.sample, options.seed)
    everything = jobs if services is None else [*services.jobs(jobs[0].submit_s), *jobs]
    outcomes = []
    for name in options.policies:
        with _progress(name) as report:
            outcomes.append(simulate(everything, build(name, policies), setting, report))
    if options.picture:
        picture.draw(outcomes, options.picture)
    if options.json:
        print(json.dumps([row(options.trace.stem, outcome) for outcome in outcomes], indent=1, ensure_ascii=False))
    else:
        _print(outcomes, len(jobs), trace.dropped)
    return 0


def _setting(options: argparse.Namespace, services: Services | None) -> Setting:
    if services is None:
        slowdown = slowdown_of(options.slowdown, options.gpu_type)
    else:
        slowdown = services.slowdown(predictor_of(options.predictor, options.pairs))
    return Setting(
        gpus=options.gpus,
        slowdown=slowdown,
        gpus_per_node=options.gpus_per_node,
        interval_s=options.interval,
        restart_s=options.restart,
    )


@contextmanager
def _progress(policy: str) -> Iterator[Report | None]:
    """On standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} jobs")
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(policy, total=None)
        yield lambda ended, total: bar.update(task, completed=ended, total=total)


def row(trace: str, outcome: Outcome) -> dict[str, object]:
    """The figures of a policy, by names with units."""
    counts = {"jobs": len(outcome.ended), "preemptions": sum(one.preemptions for one in outcome.ended)}
    return {"trace": trace, "policy": outcome.policy, **counts, **summary(outcome), "dropped": dict(outcome.dropped)}


_COLUMNS = {
    "average_jct_s": "JCT mean", "p50_jct_s": "JCT p50", "p99_jct_s": "JCT p99", "average_queueing_s": "queueing mean",
    "p50_queueing_s": "queueing p50", "p99_queueing_s": "queueing p99", "makespan_s": "makespan",
    "utilisation_ratio": "utilisation",
}  # fmt: skip
"""Figure → heading"""


def table(outcomes: Sequence[Outcome], jobs: int) -> Table:
    """A row a policy; below a figure, its ratio to the first policy's."""
    first, made = summary(outcomes[0]), Table(title=f"{jobs} jobs on {outcomes[0].gpus} GPUs; times in seconds")
    made.add_column("policy")
    for heading in _COLUMNS.values():
        made.add_column(heading, justify="right")
    for outcome in outcomes:
        figures = summary(outcome)
        made.add_row(outcome.policy, *(_cell(name, figures[name], first[name]) for name in _COLUMNS))
    return made


def _cell(name: str, value: float | None, first: float | None) -> str:
    if value is None:
        return "–"
    shown = f"{value:.1%}" if name == "utilisation_ratio" else f"{value:,.0f}"
    return f"{shown} ({value / first:.2f})" if first else shown


def _print(outcomes: Sequence[Outcome], jobs: int, dropped: Mapping[str, int]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table(outcomes, jobs))
    console.print(f"in brackets: ratio to {outcomes[0].policy}", highlight=False)
    for reason, count in sorted(dropped.items()):
        console.print(f"rows of the trace without a job: {count} ({reason})", highlight=False)
    for outcome in outcomes:
        for reason, count in sorted(outcome.dropped.items()):
            console.print(f"jobs left out under {outcome.policy}: {count} ({reason})", highlight=False)
