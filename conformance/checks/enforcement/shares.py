# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a way of sharing gave to either side, against what each has alone, and whether a promise was kept. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bench.enforcement.figures import LEAST_LEFT_OVER, left_over_ratio
from bench.enforcement.modes import Mode
from conformance.checks.enforcement.phases import Phase, few
from conformance.report.model import Verdict

P99: Final = "p99 to alone"
P50: Final = "p50 to alone"
OFFLINE: Final = "offline to alone"
LEFT: Final = "offline of what is left"
MEASURES: Final = (P99, P50, OFFLINE, LEFT)
ALIKE_RATIO: Final = 1.1  # a p99 of some seconds varies by so much
FAR_RATIO: Final = 1.3  # as in the bench: a p99 over so many times the target is a promise that was broken


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, and what it is to be compared with; `baseline` is None where nothing was expected."""

    measure: str
    ratio: float
    verdict: Verdict = Verdict.MEASURED
    baseline: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class AloneFigures:
    """The figures of both sides, each by itself."""

    phase: Phase
    steps_per_second: float


def figures(mode: Mode, phase: Phase, alone: AloneFigures) -> Iterator[Figure]:
    """One figure for each of MEASURES. Only our own law promises anything."""
    promised = mode.target_ratio if mode.law == "headroom" else None
    least = LEAST_LEFT_OVER.get(mode.target_ratio) if promised else None
    steps = phase.steps_per_second or 0.0
    p99, p50 = (phase.quantile_s(q) / alone.phase.quantile_s(q) for q in (0.99, 0.5))
    left = left_over_ratio(steps, alone.steps_per_second, alone.phase.busy_ratio)
    late = "the service fell behind, so this is a lower bound" if phase.overrun else ""
    note = "; ".join(part for part in (few(len(phase.latencies_s)), late) if part)
    yield Figure(P99, p99, believed(kept(p99, promised and promised * FAR_RATIO), phase, alone.phase), promised, note)
    yield Figure(P50, p50, note=late)
    yield Figure(OFFLINE, steps / alone.steps_per_second)
    yield Figure(LEFT, left, believed(reached(left, least), phase, alone.phase), least)


def believed(verdict: Verdict, *phases: Phase) -> Verdict:
    """The verdict on a phase; of too few requests for a p99, or of too short a time for a law, it is only a figure."""
    return verdict if all(phase.telling for phase in phases) else Verdict.MEASURED


def kept(value: float, most: float | None) -> Verdict:
    """Whether it is no more than that."""
    if most is None:
        return Verdict.MEASURED
    return Verdict.OK if value <= most else Verdict.DIFFERS


def reached(value: float, least: float | None) -> Verdict:
    """Whether it is no less than that."""
    if least is None:
        return Verdict.MEASURED
    return Verdict.OK if value >= least else Verdict.DIFFERS


def within(value: float, expected: float, factor: float) -> Verdict:
    """Whether it is that, up or down to a factor. What is not positive is not comparable, and differs."""
    if value <= 0 or expected <= 0:
        return Verdict.OK if value == expected else Verdict.DIFFERS
    return Verdict.OK if max(value / expected, expected / value) <= factor else Verdict.DIFFERS


def p99_lower(p99_ratios: Mapping[str, float], ours: str, theirs: str, note: str = "") -> Figure | None:
    """Whether our p99 is lower than theirs, where they are further apart than ALIKE_RATIO; None: not both measured."""
    if ours not in p99_ratios or theirs not in p99_ratios:
        return None
    mine, other = p99_ratios[ours], p99_ratios[theirs]
    alike = within(mine, other, ALIKE_RATIO) is Verdict.OK
    verdict = Verdict.MEASURED if alike else Verdict.OK if mine < other else Verdict.DIFFERS
    return Figure(P99, mine, verdict, other, note)
