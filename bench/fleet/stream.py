# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""50 production and 50 opportunistic jobs out of Philly on a few GPUs, as in the slides of TGS' talk, three ways.

- exclusive: a GPU has one job; production first;
- co-execution: an opportunistic job may run beside a production job, and nothing protects either. Both are busy for
  the part u of the time (TGS' slides: 52 % on average in Philly); taken as independent, the other wants the GPU too for
  u of that time, and both then get half: ξ = 1 + u². What switching costs is left out, which is in its favour;
- pairing: the same placement, the production job is held harmless, the opportunistic one gets what the prior expects.

So what production jobs gain over co-execution is close to 1 − 1/(1 + u²): it follows from u, and shows no more than
that the placement takes nothing of it away. A larger u makes that gain larger and the opportunistic jobs' smaller.

The slides say neither how many GPUs there were, nor which jobs, nor their kernels: what is assumed is in Stream, and
the mean over several draws is shown.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Final

from fleet.model import Job, Slot, TraceJob
from fleet.policies import Options, build
from fleet.simulator.cluster import Slowdown
from fleet.simulator.engine import Setting, simulate
from fleet.simulator.outcome import Outcome, summary
from fleet.simulator.slowdown import predicted
from fleet.weights.physical import Physical

PRODUCTION: Final = "production"
OPPORTUNISTIC: Final = "opportunistic"


@dataclass(frozen=True, slots=True)
class Stream:
    """What is assumed."""

    each: int = 50
    """Jobs of either class"""
    gpus: int = 4
    draws: int = 20
    load: float = 0.52
    """Part of the time in which a job uses its GPU: the mean that TGS' slides give for Philly"""
    gap_s: float = 0.02
    """Mean idle time between the bursts of a production job"""
    kernel_s: float = 0.001
    """Mean length of an opportunistic job's kernels"""

    def held(self) -> Slowdown:
        """A production job beside an opportunistic one, with the agent."""
        slot = Slot("node", "GPU", "H200", PRODUCTION, self.load, self.gap_s, self.gap_s, 0, None)
        job = Job(OPPORTUNISTIC, OPPORTUNISTIC, 0, self.kernel_s)
        return predicted(Physical(), {PRODUCTION: slot}, {OPPORTUNISTIC: job})

    def unheld(self) -> Slowdown:
        """The same pairs without it."""
        factor = 1 + self.load**2
        return lambda one, other: None if bool(one.online) == bool(other.online) else (factor, factor)


def drawn(jobs: Sequence[TraceJob], stream: Stream, seed: int) -> list[TraceJob]:
    """Consecutive one-GPU jobs of a trace, of which half are production jobs."""
    draw = random.Random(seed)
    count = 2 * stream.each
    singles = [job for job in jobs if job.gpus == 1 and job.duration_s]
    first = draw.randrange(len(singles) - count)
    production = set(draw.sample(range(count), stream.each))
    return [
        replace(job, online=place in production, kind=PRODUCTION if place in production else OPPORTUNISTIC)
        for place, job in enumerate(singles[first : first + count])
    ]


def _mean_jct_s(outcome: Outcome, kind: str) -> float:
    return mean(one.jct_s for one in outcome.ended if one.job.kind == kind)


def stream_rows(jobs: Sequence[TraceJob], stream: Stream) -> Iterator[dict[str, Any]]:
    """A row a way, figures and ratios being means over the draws."""
    held, unheld = Setting(stream.gpus, stream.held()), Setting(stream.gpus, stream.unheld())
    ways = (("exclusive", "fifo", held), ("co-execution", "pairing", unheld), ("pairing", "pairing", held))
    runs: dict[str, list[Outcome]] = {way: [] for way, _, _ in ways}
    for seed in range(stream.draws):
        chosen = drawn(jobs, stream, seed)
        for way, policy, setting in ways:
            runs[way].append(simulate(chosen, build(policy, Options()), setting))
    for way, outcomes in runs.items():
        summaries = [summary(outcome) for outcome in outcomes]
        yield {
            "trace": f"stream of {stream.each} + {stream.each}",
            "policy": way,
            "slowdown": 1 + stream.load**2 if way == "co-execution" else None,
            "gpus": stream.gpus,
            "how": f"mean of {stream.draws} draws",
            **{name: mean(one[name] or 0.0 for one in summaries) for name in summaries[0]},
            "opportunistic_to_exclusive": _ratio(outcomes, runs["exclusive"], OPPORTUNISTIC),
            "production_to_coexecution": _ratio(outcomes, runs["co-execution"], PRODUCTION),
        }


def _ratio(outcomes: Sequence[Outcome], base: Sequence[Outcome], kind: str) -> float:
    """Geometric mean over the draws, as of ratios."""
    pairs = zip(outcomes, base, strict=True)
    return math.exp(mean(math.log(_mean_jct_s(one, kind) / _mean_jct_s(other, kind)) for one, other in pairs))
