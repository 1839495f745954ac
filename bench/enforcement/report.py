# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the enforcement bench found: a table for a terminal, and a page in Markdown with the marks that were met."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.table import Table

from bench.enforcement.figures import Mark, natural_spread
from bench.enforcement.modes import ALONE, OWN_SETTLE
from bench.enforcement.pairs import PAIRS, Pair

_SHOWN: Final = {
    "p50": "online_p50_ratio",
    "p99": "online_p99_ratio",
    "p999": "online_p999_ratio",
    "late": "slo_miss_ratio",
    "offline to alone": "offline_to_alone_ratio",
    "of the time left": "offline_left_over_ratio",
}

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row]) -> Table:
    """The table of all rows, for a terminal."""
    table = Table("pair", "mode", *_SHOWN, title="to alone without probes", title_justify="left")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following["pair"] != row["pair"]
        table.add_row(row["pair"], row["mode"], *_cells(row), end_section=last)
    return table


def write_report(rows: Sequence[Row], found: Sequence[Mark], seconds: float, signal: str) -> str:
    """The whole page."""
    today, cpus = datetime.now(UTC).date().isoformat(), os.cpu_count()
    rounds = max(row["rounds"] for row in rows)
    parts = [
        "# What each way of sharing gives to an online service and to the work beside it",
        "",
        f"Written by `make bench-enforcement` on the simulated GPU, with {cpus} virtual CPUs"
        f"{' in a virtual machine' if _is_virtual() else ''}, on {today}. "
        f"{'One round' if rounds == 1 else f'Median (least–most) of {rounds} rounds, each with other arrivals'}; "
        f"{seconds:g} s measured of each phase (longer where arrivals are slow), {_requests(rows)}; signal `{signal}`.",
        "Latencies are the online workload's own, from the moment at which a request was to arrive; ratios are to both "
        "phases alone, which come first and last, without a probe.",
        "",
        "## Marks",
        "",
        "| mark | found | met |",
        "|---|---|---|",
        *(f"| {mark.text} | {mark.found} | {_word(mark)} |" for mark in found),
        "",
        "## Medians of the pairs",
        "",
        *_medians(rows),
        "",
        "## Every pair",
        "",
        *_pairs(rows),
        "",
        *_noise(rows),
        "",
        "## What was run",
        "",
        *_shapes(rows, seconds),
        "",
        _HOW.format(
            signal=signal,
            settling=", ".join(f"`{law}` {seconds:g}" for law, seconds in OWN_SETTLE.items()),
        ),
        *([_SEVERAL_PHASES.format(" and ".join(_with_several_phases()))] if rounds == 1 else []),
    ]
    return "\n".join(parts) + "\n"


def _cells(row: Row) -> list[str]:
    if row["online_p99_ratio"] is None:
        return ["–"] * len(_SHOWN)
    return [_spread(heading, row, column) for heading, column in _SHOWN.items()]


def _spread(heading: str, row: Row, column: str) -> str:
    """The median, and between which figures the rounds lie."""
    middle = _text(heading, row[column])
    if row["rounds"] < 2 or column not in row["least"]:
        return middle
    return f"{middle} ({_text(heading, row['least'][column])}–{_text(heading, row['most'][column])})"


def _text(heading: str, value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}" if heading == "late" else f"{value:.2f}"


def _word(mark: Mark) -> str:
    return "–" if mark.met is None else "yes" if mark.met else "**no**"


def _medians(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| mode | {' | '.join(_SHOWN)} |"
    yield f"|---|{'---|' * len(_SHOWN)}"
    for mode in dict.fromkeys(row["mode"] for row in rows):
        mine = [row for row in rows if row["mode"] == mode and row["online_p99_ratio"] is not None]
        if mine:
            cells = (_text(heading, median(row[column] for row in mine)) for heading, column in _SHOWN.items())
            yield f"| {mode} | {' | '.join(cells)} |"


def _pairs(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| pair | mode | {' | '.join(_SHOWN)} | |"
    yield f"|---|---|{'---|' * len(_SHOWN)}---|"
    for row in rows:
        note = f"not available: {row['unavailable']}" if "unavailable" in row else ""
        yield f"| {row['pair']} | {row['mode']} | {' | '.join(_cells(row))} | {note} |"


def _noise(rows: Sequence[Row]) -> Iterator[str]:
    alone = {row["pair"]: row["alone_p99_ms"] for row in rows if "alone_p99_ms" in row}
    texts = ", ".join(f"{pair} {first:.2f} and {second:.2f}" for pair, (first, second) in alone.items())
    yield f"p99 alone in ms, at the beginning and at the end of each pair: {texts}."
    watched = {
        row["pair"]: _spread("", row, "watched_p99_ratio") for row in rows if row.get("watched_p99_ratio") is not None
    }
    if watched:
        yield (
            "p99 alone while the agent only watches (before the laws and after them, together), to alone without "
            f"probes: {', '.join(f'{pair} {ratio}' for pair, ratio in watched.items())}."
        )
    stolen = [row["stolen_ratio"] for row in rows if row.get("stolen_ratio") is not None]
    if stolen:
        yield (
            "Share of the CPUs that the hypervisor took during a phase: "
            f"{median(stolen):.1%} in the median, {max(stolen):.1%} at most."
        )


def _shapes(rows: Sequence[Row], seconds: float) -> Iterator[str]:
    left = {row["pair"]: row["left_ratio"] for row in rows if "left_ratio" in row}
    idle = {row["pair"]: row["idle_ratio"] for row in rows if "idle_ratio" in row}
    for name in dict.fromkeys(row["pair"] for row in rows):
        pair = PAIRS[name]
        beside = " and ".join(f"`offline {shlex.join(arguments)}`" for arguments in pair.offline)
        source = "the trace at" if pair.trace else "Poisson,"
        yield (
            f"- {name} ({pair.what}): `online {shlex.join(pair.online)}`, {source} {pair.rate_per_second:g} a second, "
            f"leaves {_share(left.get(name))} of the SM time and {_share(idle.get(name))} of the time; beside {beside}"
            f"{_spread_alone(pair, idle.get(name), seconds)}"
        )


def _spread_alone(pair: Pair, idle_ratio: float | None, seconds: float) -> str:
    if pair.trace or idle_ratio is None or idle_ratio >= 1:
        return ""
    spread = natural_spread(pair.rate_per_second, 1 - idle_ratio, seconds * pair.stretch)
    return f"; p99 alone of other arrivals as long: ± {spread:.0%}"


def _share(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.0%}"


def _requests(rows: Sequence[Row]) -> str:
    counts = [row["requests"] for row in rows if row.get("requests") and row["mode"] != ALONE]
    return f"{min(counts)} to {max(counts)} requests" if counts else "no requests"


def _is_virtual() -> bool:
    return "hypervisor" in Path("/proc/cpuinfo").read_text()


_HOW: Final = """## How to read it

- `late`: requests over the target, which is t times the p99 alone for `headroom@t` and 1.1 times for all others.
- `offline to alone`: the offline side's SM time, to what it gets alone.
- `of the time left`: the same, over the part of the time in which the online side alone serves no request. One
  denominator for all modes; under MPS more than 1 is possible, as offline kernels also run on SMs that the online
  side's kernels leave idle.
- The law's own target is t times the p99 alone *as its signal (`{signal}`) reads it*, measured in the same run.
  `gpu_wait` does not see how long a request waits inside the service before its first launch; the ratios here do.
- A law settles for some seconds before each measurement ({settling}, all others 1), which are left out.
  `tgs` samples every 2 s (published: 5), and profiles the online side for five samples and more before it lets
  anything through.
- Where the online side cannot keep up, the offline side ends 10 s after the last arrival: such ratios are lower bounds.
- `p99 alone of other arrivals as long`: the standard deviation of p99 alone from one such phase to the next, for
  Poisson arrivals and requests of one length. Where it is large, a target of 1.1 times the p99 of one phase is missed
  in others without any offline work; and the law settles on other arrivals than it is measured with.
- Ours and `tgs` ran without MPS.
- The online side and the simulated GPU share one CPU, everything else has the other ones."""

_SEVERAL_PHASES: Final = """- Each phase of {} was measured three times, and the one with the middle p99 counts:
  there, one pause of the machine of some milliseconds moves the p99 by a quarter, also alone."""


def _with_several_phases() -> Iterator[str]:
    return (f"`{name}`" for name, pair in PAIRS.items() if pair.rounds > 1)
