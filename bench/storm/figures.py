# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The figures of a storm: what was broken, and how long it took until all ran, by kind of act. Pure.

The invariants are judged; times are compared with their goals and printed, as they are the machine's too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.storm.acts import Act, Blow, Kind, Shortage, Victims

INVARIANTS: Final = (
    "left_stopped",
    "left_frozen",
    "left_locked",
    "left_limited",
    "wrong_process_touched",
    "workloads_ended",
    "not_enforced_again",
    "ledgers_unreadable",
    "ledger_entries_left",
    "left_probes",
    "left_pins",
    "left_cgroups",
    "left_processes",
)
BUCKETS_MS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)  # up to; the last one: beyond


@dataclass(slots=True)
class Outcome:
    """What one act came to. `met`: how many workloads stood still at it; `broken`: by invariant, whom or what.

    `stood_ms`: until all ran that were stopped or frozen; None of an act that releases nothing. `slow_ms`: until those
    that were locked, saved or refused memory did their work again, where nobody enforces. `skipped`: why the act could
    not be done here.
    """

    act: Act
    met: int = 0
    stood_ms: float | None = None
    slow_ms: float | None = None
    broken: dict[str, list[str]] = field(default_factory=dict)
    skipped: str = ""

    def breaks(self, invariant: str, what: str) -> None:
        """Notes it."""
        self.broken.setdefault(invariant, []).append(what)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of the times of some kinds of acts."""

    what: str
    ratio: float  # of a quantile; 1: the worst
    most_ms: float
    blow_kills: bool
    victims: tuple[Victims, ...]

    def is_of(self, kind: Kind) -> bool:
        """Whether it is about acts of that kind. In a shortage there is no promise of a time."""
        kills = kind.blow is not Blow.STOP
        return kills == self.blow_kills and kind.victims in self.victims and kind.shortage is Shortage.NOTHING


def goals(max_pause_seconds: float) -> tuple[Goal, ...]:
    """What is aimed at."""
    return (
        Goal("one of the two killed: p99", 0.99, 100.0, True, (Victims.AGENT, Victims.GUARDIAN)),
        Goal("both killed: worst", 1.0, 500.0, True, (Victims.BOTH,)),
        Goal("both stand still: worst", 1.0, (max_pause_seconds + 1) * 1e3, False, (Victims.BOTH,)),
    )


def quantile(values: Iterable[float], ratio: float) -> float | None:
    """The least of the values that at least that share of them does not exceed; None of none."""
    ordered = sorted(values)
    rank = max(1, -int(-ratio * len(ordered) // 1))
    return ordered[rank - 1] if ordered else None


def histogram(values: Iterable[float]) -> dict[str, int]:
    """How many values lie in each bucket, by its upper end in ms; empty ones are left out."""
    counts = Counter(next((str(most) for most in BUCKETS_MS if value <= most), "beyond") for value in values)
    return {name: counts[name] for name in (*map(str, BUCKETS_MS), "beyond") if counts[name]}


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One for each kind of act. Times are of the acts that met a workload standing still or had one stop after."""
    kinds = dict.fromkeys(outcome.act.kind for outcome in outcomes)
    return [_row(kind, [outcome for outcome in outcomes if outcome.act.kind == kind]) for kind in kinds]


def _row(kind: Kind, of_kind: Sequence[Outcome]) -> dict[str, Any]:
    times = _times(of_kind)
    slow = [outcome.slow_ms for outcome in of_kind if outcome.slow_ms is not None]
    return {
        "act": kind.name,
        "kills": sum(not outcome.skipped for outcome in of_kind),
        "met_standing": len(times),
        "moments": dict(Counter(str(outcome.act.moment) for outcome in of_kind)),
        "p50_ms": _rounded(quantile(times, 0.5)),
        "p99_ms": _rounded(quantile(times, 0.99)),
        "max_ms": _rounded(quantile(times, 1.0)),
        "histogram_ms": histogram(times),
        "slow_max_ms": _rounded(quantile(slow, 1.0)),
        "broken": sum(bool(outcome.broken) for outcome in of_kind),
    }


def _times(outcomes: Iterable[Outcome]) -> list[float]:
    timed = ((one.stood_ms, one.met) for one in outcomes if not one.skipped)
    return [stood_ms for stood_ms, met in timed if stood_ms is not None and (met or stood_ms)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def verdicts(outcomes: Sequence[Outcome], max_pause_seconds: float) -> list[dict[str, Any]]:
    """Each goal, what was seen, and whether it was reached; None where nothing was seen."""
    found = []
    for goal in goals(max_pause_seconds):
        seen = quantile(_times(one for one in outcomes if goal.is_of(one.act.kind)), goal.ratio)
        reached = None if seen is None else seen <= goal.most_ms
        found.append({"goal": goal.what, "most_ms": goal.most_ms, "seen_ms": _rounded(seen), "reached": reached})
    return found


def summary(outcomes: Sequence[Outcome], at_end: Mapping[str, int], max_pause_seconds: float) -> dict[str, Any]:
    """The one line of the whole storm. `at_end`: what of each invariant was broken when all was over."""
    broken = {
        name: sum(len(outcome.broken.get(name, ())) for outcome in outcomes) + at_end.get(name, 0)
        for name in INVARIANTS
    }
    one_dead, both_dead, both_still = (row["seen_ms"] for row in verdicts(outcomes, max_pause_seconds))
    return {
        "kills": sum(not outcome.skipped for outcome in outcomes),
        "skipped": sum(bool(outcome.skipped) for outcome in outcomes),
        **broken,
        "p99_ms": one_dead,
        "max_ms": both_dead,
        "still_max_ms": both_still,
    }


def holds(found: Mapping[str, Any]) -> bool:
    """Whether no invariant was broken and something was tried."""
    return found["kills"] > 0 and not any(found[name] for name in INVARIANTS)
