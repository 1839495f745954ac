# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the enforcement bench's phases come to. Pure: what was measured in, rows and verdicts out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, median, stdev
from typing import Any, Final

from bench.enforcement.modes import ALONE, Mode

QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
COLUMNS: Final = (
    "pair",
    "mode",
    "online_p50_ratio",
    "online_p99_ratio",
    "online_p999_ratio",
    "slo_miss_ratio",
    "offline_left_over_ratio",
)
_OF_ROUNDS: Final = (
    *COLUMNS[2:],
    "offline_to_alone_ratio",
    "watched_p99_ratio",
    "stolen_ratio",
    "idle_ratio",
    "left_ratio",
)
LEAST_LEFT_OVER: Final = {1.1: 0.6, 1.5: 0.8, 3.0: 0.95}  # what the median of the pairs is to reach
MOST_WATCHED: Final = 1.05  # p99 while the agent only watches, to alone
_TOLERANCE: Final = 0.05
_FAR_RATIO: Final = 1.3
_PAIRS_PER_MISS: Final = 8


def nearest_rank(values: Sequence[float], quantile: float) -> float:
    """One of these, of which there is one at least."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, measured: latencies from the arrival that was meant, and what the GPU truly did meanwhile."""

    latencies_s: tuple[float, ...]
    online_sm_ratio: float  # of the device's SM time
    offline_sm_ratio: float  # of all offline workloads together
    stolen_ratio: float | None = None  # of the machine's CPUs, by its hypervisor
    online_busy_ratio: float = 0.0  # of the time, some request was being served
    signal_ns: float | None = None  # the online side's p99 as the agent's signal reads it

    def quantile_s(self, quantile: float) -> float:
        """Latency at a quantile, by the nearest rank."""
        return nearest_rank(self.latencies_s, quantile)


def middle(phases: Sequence[Phase]) -> Phase:
    """The median phase by p99, of an odd number of phases that were alike."""
    return sorted(phases, key=lambda phase: phase.quantile_s(QUANTILES["p99"]))[len(phases) // 2]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A pair's online side alone, measured twice with everything else in between; the offline side alone once.

    `watched`: the online side alone with the agent on its probes, before the laws and after them; empty: no law was
    measured.
    """

    first: Phase
    second: Phase
    offline_sm_ratio: float
    watched: tuple[Phase, ...] = ()

    @property
    def both(self) -> Phase:
        """Both phases' requests together."""
        sm_ratio = (self.first.online_sm_ratio + self.second.online_sm_ratio) / 2
        busy_ratio = (self.first.online_busy_ratio + self.second.online_busy_ratio) / 2
        return Phase(_latencies(self.first, self.second), sm_ratio, 0.0, online_busy_ratio=busy_ratio)

    @property
    def watched_p99_ratio(self) -> float | None:
        """p99 of all requests that were watched, to alone."""
        if not self.watched:
            return None
        return nearest_rank(_latencies(*self.watched), QUANTILES["p99"]) / self.both.quantile_s(QUANTILES["p99"])


def _latencies(*phases: Phase) -> tuple[float, ...]:
    return tuple(latency_s for phase in phases for latency_s in phase.latencies_s)


def left_over_ratio(offline_sm_ratio: float, offline_alone_sm_ratio: float, taken_ratio: float) -> float:
    """Offline throughput, to alone, over the time that the online side leaves when it is alone. NaN: it leaves none.

    `taken_ratio`: of the time, some request is in service. The same denominator for every mode, so that modes compare;
    under MPS more than 1 is possible, as offline kernels also use SMs that running online kernels leave idle.
    """
    if offline_alone_sm_ratio <= 0 or taken_ratio >= 1:
        return math.nan
    return offline_sm_ratio / offline_alone_sm_ratio / (1 - taken_ratio)


def natural_spread(rate_per_second: float, busy_ratio: float, seconds: float, draws: int = 200) -> float:
    """How far p99 alone of other Poisson arrivals of this length is from this one's: standard deviation over mean.

    One request at a time, each as long as the next (Lindley's recursion). No target below 1 + this can be judged by one
    phase: alone, too, the next one may miss it.
    """
    service_s, random = busy_ratio / rate_per_second, Random(1)
    found = []
    for _ in range(draws):
        at_s, waits_s = 0.0, 0.0
        latencies: list[float] = []
        while at_s < seconds:
            gap_s = random.expovariate(rate_per_second)
            at_s, waits_s = at_s + gap_s, max(0.0, waits_s + (service_s if latencies else 0.0) - gap_s)
            latencies.append(waits_s + service_s)
        found.append(nearest_rank(latencies, QUANTILES["p99"]))
    return stdev(found) / mean(found)


def miss_ratio(latencies_s: Sequence[float], target_s: float) -> float:
    """How many requests took longer than the target."""
    return sum(latency > target_s for latency in latencies_s) / len(latencies_s)


def row_of(pair: str, mode: Mode, phase: Phase, alone: Baseline) -> dict[str, Any]:
    """One row: the columns that were promised, and what they were made from."""
    base = alone.both
    ratios = {f"online_{name}_ratio": phase.quantile_s(q) / base.quantile_s(q) for name, q in QUANTILES.items()}
    target_s = mode.target_ratio * base.quantile_s(QUANTILES["p99"])
    offline = phase.offline_sm_ratio
    watched = alone.watched_p99_ratio
    return {
        "pair": pair,
        "mode": mode.name,
        **{name: round(ratio, 4) for name, ratio in ratios.items()},
        "slo_miss_ratio": round(miss_ratio(phase.latencies_s, target_s), 5),
        "offline_left_over_ratio": round(left_over_ratio(offline, alone.offline_sm_ratio, base.online_busy_ratio), 4),
        "offline_to_alone_ratio": round(offline / alone.offline_sm_ratio, 4),
        "offline_alone_ratio": round(alone.offline_sm_ratio, 4),
        "online_p99_ms": round(phase.quantile_s(0.99) * 1e3, 3),
        "alone_p99_ms": [round(one.quantile_s(0.99) * 1e3, 3) for one in (alone.first, alone.second)],
        "watched_p99_ratio": None if watched is None else round(watched, 4),
        "left_ratio": round(1 - base.online_sm_ratio, 4),
        "idle_ratio": round(1 - base.online_busy_ratio, 4),
        "target_ratio": None if mode.name == ALONE else mode.target_ratio,
        "signal_p99_ms": None if phase.signal_ns is None else round(phase.signal_ns / 1e6, 3),
        "requests": len(phase.latencies_s),
        "mps": mode.mps,
        "stolen_ratio": None if phase.stolen_ratio is None else round(phase.stolen_ratio, 4),
    }


def unavailable(pair: str, mode: str, reason: str) -> dict[str, Any]:
    """The row of a mode that could not be had: nothing in it is a figure."""
    return {**dict.fromkeys(COLUMNS), "pair": pair, "mode": mode, "unavailable": reason}


def over_rounds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each pair and mode: the medians of its rounds, with `rounds`, and `least` and `most` by column."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["pair"], row["mode"]), []).append(row)
    return [_over_rounds(of_rounds) for of_rounds in groups.values()]


def _over_rounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if row["online_p99_ratio"] is not None]
    if not measured:
        return {**rows[0], "rounds": 0}
    values = {column: [row[column] for row in measured if row.get(column) is not None] for column in _OF_ROUNDS}
    known = {column: found for column, found in values.items() if found}
    return {
        **measured[0],
        **{column: median(found) for column, found in known.items()},
        "rounds": len(measured),
        "least": {column: min(found) for column, found in known.items()},
        "most": {column: max(found) for column, found in known.items()},
    }


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that the figures are to reach, and what was found. `met` is None where nothing was measured."""

    text: str
    found: str
    met: bool | None


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Those of the bench, for the targets that were measured."""
    measured = [row for row in rows if row["online_p99_ratio"] is not None]
    targets = sorted({float(row["mode"].partition("@")[2]) for row in measured if "@" in row["mode"]})
    out = [mark for target in targets for mark in _of_target(target, measured)]
    return [*out, _watching(measured), _better_than_tgs(measured)]


def _of_target(target: float, rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    mine = [row for row in rows if row["mode"] == f"headroom@{target:g}"]
    p99 = {row["pair"]: row["online_p99_ratio"] for row in mine}
    over = [f"{pair} {ratio:.2f}" for pair, ratio in p99.items() if ratio > target + _TOLERANCE]
    far = [f"{pair} {ratio:.2f}" for pair, ratio in p99.items() if ratio > _FAR_RATIO * target]
    within = len(p99) - len(over)
    out = [
        Mark(
            f"headroom@{target:g}: p99 ≤ {target + _TOLERANCE:.2f} in at least 7 of 8 pairs",
            f"{within} of {len(p99)}{'; not ' + ', '.join(over) if over else ''}",
            len(over) <= len(p99) // _PAIRS_PER_MISS,
        ),
        Mark(
            f"headroom@{target:g}: p99 never above {_FAR_RATIO * target:.2f}",
            ", ".join(far) or f"at most {max(p99.values()):.2f}",
            not far,
        ),
    ]
    least = LEAST_LEFT_OVER.get(target)
    if least is not None:
        middle = median(row["offline_left_over_ratio"] for row in mine)
        out.append(
            Mark(
                f"headroom@{target:g}: offline work gets ≥ {least:g} of the time left (median of the pairs)",
                f"{middle:.2f}",
                middle >= least,
            )
        )
    return out


def _better_than_tgs(rows: Sequence[Mapping[str, Any]]) -> Mark:
    """Where it is not, with what each gives to offline work: a mode that gives nothing is hard to beat on p99."""
    text = "headroom@1.1: p99 better than tgs in every pair"
    mine, theirs = ({row["pair"]: row for row in rows if row["mode"] == mode} for mode in ("headroom@1.1", "tgs"))
    pairs = [pair for pair in mine if pair in theirs]
    if not pairs:
        return Mark(text, "not measured", None)
    worse = [
        f"{pair}: {_both(mine[pair])} to {_both(theirs[pair])}"
        for pair in pairs
        if mine[pair]["online_p99_ratio"] >= theirs[pair]["online_p99_ratio"]
    ]
    found = f"{len(pairs) - len(worse)} of {len(pairs)}"
    return Mark(text, "; not ".join([found, ", ".join(worse)]) if worse else found, not worse)


def _watching(rows: Sequence[Mapping[str, Any]]) -> Mark:
    text = f"the agent only watches: p99 ≤ {MOST_WATCHED:.2f} in every pair"
    ratios = {row["pair"]: row["watched_p99_ratio"] for row in rows if row.get("watched_p99_ratio") is not None}
    if not ratios:
        return Mark(text, "not measured", None)
    over = [f"{pair} {ratio:.2f}" for pair, ratio in ratios.items() if ratio > MOST_WATCHED]
    found = f"{len(ratios) - len(over)} of {len(ratios)}{'; not ' + ', '.join(over) if over else ''}"
    return Mark(text, found, not over)


def _both(row: Mapping[str, Any]) -> str:
    return f"{row['online_p99_ratio']:.2f} at {row['offline_left_over_ratio']:.2f} of the time left"
