# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the hardware divides a GPU by itself: turns of processes, what a newcomer gets and when, and what slows what.

Two processes without limits, with time slicing and as clients of one MPS server. Rates are against those of the same
process alone, seconds before: so clocks and the machine are the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from conformance.checks.mps.endings import gap_ms
from conformance.checks.stopping.timeline import Timeline
from conformance.clients import launcher
from conformance.clients.launcher import Client
from conformance.host import Host, Unavailable
from conformance.report.model import Row, measured, part

TITLE: Final = "how the GPU is divided: turns, newcomers, and what slows what"
SECONDS: Final = 40
LEAST_SECONDS: Final = 27
ITEM: Final = "sharing"
TURN: Final = "time slicing: a turn of a process with kernels of 200 µs"
TURN_P90: Final = "time slicing: 90th percentile of such turns"
EQUAL: Final = "time slicing: kernels of a newcomer, of all, with kernels of the same length"
UNEQUAL: Final = "time slicing: time of a process with kernels of 200 µs, of that of both, beside kernels of 5 ms"
FIRST: Final = "newcomer: its first kernel ends after"
SHARE: Final = "newcomer: it has its share after"
PAUSE: Final = "newcomer: longest time in which the older process ended no kernel while it started"
TURNS: Final = (TURN, TURN_P90, EQUAL, FIRST, SHARE, PAUSE)
MODES: Final = ("time slicing", "MPS")
KINDS: Final = {
    "half": "kernels on half of the SMs",
    "full": "kernels on all SMs",
    "on_device": "copies within the device",
    "to_device": "copies to the device",
    "to_host": "copies to the host",
}
PAIRS: Final = (
    ("half", "half"),
    ("full", "full"),
    ("on_device", "on_device"),
    ("half", "on_device"),
    ("on_device", "full"),
    ("to_device", "to_device"),
    ("to_device", "to_host"),
    ("half", "to_device"),
)
_BESIDE: Final = "{mode}: {first} beside {second}: rate to alone"
_SHORT_US, _LONG_US = 200, 5000
_SHORT: Final = ("--kernel-us", str(_SHORT_US), "--queue", "64")
_LONG: Final = ("--kernel-us", str(_LONG_US), "--queue", "4")
_WINDOW_NS: Final = 50_000_000
_ITS_SHARE_RATIO: Final = 0.8  # of its rate later on
_WARMING_MS: Final = 30
_ANSWER_SECONDS: Final = 10.0
_UNTOLD: Final = "the simulated GPU does not model memory bandwidth"


def _beside(mode: str, pair: tuple[str, str]) -> str:
    return _BESIDE.format(mode=mode, first=KINDS[pair[0]], second=KINDS[pair[1]])


WHAT: Final = (*TURNS, UNEQUAL, *(_beside("{mode}", pair) for pair in PAIRS))


@dataclass(frozen=True, slots=True)
class Turn:
    """A process' kernels that ended one after the other, with none of the other process between them."""

    first: bool  # of the first process
    ns: int  # since the last end of the other one
    kernels: int


def rows(host: Host) -> Iterator[Row]:
    """Turns, then pairs of work, first without MPS."""
    yield from part(ITEM, TURNS, partial(_turn_rows, host))
    yield from part(ITEM, [UNEQUAL], partial(_unequal_row, host))
    for mode in MODES:
        yield from part(ITEM, [_beside(mode, pair) for pair in PAIRS], partial(_contention, host, mode))


def _steps(host: Host, *options: str) -> Client:
    return launcher.start(host, launcher.own(host, "steps", *options), launcher.importing())


def _two(host: Host, first: Sequence[str], second: Sequence[str]) -> tuple[Timeline, Timeline, int, int]:
    """One that works for a while, and one that comes then; when the second was started, and when both were ended."""
    seconds = 0.4 if host.quick else 1.5
    with ExitStack() as stack:
        older = _steps(host, *first)
        stack.callback(older.end)
        time.sleep(seconds / 2)
        started_ns = time.monotonic_ns()
        newcomer = _steps(host, *second, *older.pace)
        stack.callback(newcomer.end)
        time.sleep(seconds)
        ended_ns = time.monotonic_ns()
        late = newcomer.finish()
        early = older.finish()
    for record in (early, late):
        if record["error"]:
            raise Unavailable(f"a process that launches got {record['error']}")
    return Timeline.of(early), Timeline.of(late), started_ns, ended_ns


def _turn_rows(host: Host) -> Iterator[Row]:
    older, newcomer, started_ns, ended_ns = _two(host, _SHORT, _SHORT)
    if not newcomer.ended_ns or not newcomer.launched_ns:
        raise Unavailable("the process that came later got nothing done")
    arrived_ns, settled_ns = newcomer.launched_ns[0], (newcomer.launched_ns[0] + ended_ns) // 2
    inside = [[at for at in line.ended_ns if settled_ns < at < ended_ns] for line in (older, newcomer)]
    lengths = [turn.ns / 1e6 for turn in turns(*inside)]
    if lengths:
        kernels = median(turn.kernels for turn in turns(*inside))
        yield measured(ITEM, TURN, median(lengths), "ms", note=f"median of {len(lengths)}, of {kernels:g} kernels")
        yield measured(ITEM, TURN_P90, sorted(lengths)[int(0.9 * (len(lengths) - 1))], "ms")
    total = len(inside[0]) + len(inside[1])
    yield measured(ITEM, EQUAL, len(inside[1]) / total if total else None, "ratio", 0.5)
    yield measured(ITEM, FIRST, (newcomer.ended_ns[0] - arrived_ns) / 1e6, "ms", note="from the return of its launch")
    after_ns = share_after_ns(newcomer, arrived_ns, settled_ns, ended_ns)
    note = f"the first {_WINDOW_NS // 1_000_000} ms with {_ITS_SHARE_RATIO:.0%} of its rate later on, to their end"
    yield measured(ITEM, SHARE, None if after_ns is None else after_ns / 1e6, "ms", note=note)
    pause = gap_ms(older.ended_ns, started_ns, newcomer.ended_ns[0])
    yield measured(ITEM, PAUSE, pause, "ms", note="its context is made then, too")


def turns(first_ns: Sequence[int], second_ns: Sequence[int]) -> list[Turn]:
    """Whole turns of two processes, from when their kernels ended; the first and the last one are cut off."""
    ends = sorted([(at, True) for at in first_ns] + [(at, False) for at in second_ns])
    runs = [(owner, [at for at, _ in found]) for owner, found in itertools.groupby(ends, key=lambda end: end[1])]
    return [Turn(owner, at[-1] - before[-1], len(at)) for (_, before), (owner, at) in itertools.pairwise(runs[:-1])]


def share_after_ns(line: Timeline, arrived_ns: int, settled_ns: int, ended_ns: int) -> int | None:
    """From a process' first launch to the end of the first window in which it has its share; None: there was none."""
    least = _ITS_SHARE_RATIO * line.rate(settled_ns, ended_ns)
    for since in range(arrived_ns, ended_ns - _WINDOW_NS, _WINDOW_NS // 5):
        if line.rate(since, since + _WINDOW_NS) >= least > 0:
            return since + _WINDOW_NS - arrived_ns
    return None


def _unequal_row(host: Host) -> Iterator[Row]:
    older, newcomer, _, ended_ns = _two(host, _LONG, _SHORT)
    since_ns = (newcomer.launched_ns[0] + ended_ns) // 2 if newcomer.launched_ns else ended_ns - 1
    long_s, short_s = (
        line.rate(since_ns, ended_ns) * us / 1e6 for line, us in ((older, _LONG_US), (newcomer, _SHORT_US))
    )
    note = f"{short_s:.2f} and {long_s:.2f} s of kernels in a second"
    yield measured(ITEM, UNEQUAL, short_s / (short_s + long_s) if short_s + long_s else None, "ratio", 0.5, note)


def _contention(host: Host, mode: str) -> Iterator[Row]:
    with ExitStack() as stack:
        extra = stack.enter_context(host.mps()) if mode == "MPS" else {}
        first = _traffic(stack, host, extra)
        second = _traffic(stack, host, extra, *first.pace)
        first.ask(f"{PAIRS[0][0]} {_WARMING_MS}", _ANSWER_SECONDS)
        alone: dict[str, float] = {}
        for pair in PAIRS:
            yield _pair_row(host, mode, pair, (first, second), alone)


def _traffic(stack: ExitStack, host: Host, extra: Mapping[str, str], *options: str) -> Client:
    command = launcher.own(host, "traffic", *options)
    made = launcher.start(host, command, {**launcher.importing(), **extra})
    stack.callback(made.end)
    return made


def _pair_row(
    host: Host, mode: str, pair: tuple[str, str], clients: tuple[Client, Client], alone: dict[str, float]
) -> Row:
    """`alone`: by kind, measured once. The second process begins before the first one, and ends after it."""
    kind, other = pair
    first, second = clients
    ms = 40 if host.quick else 300
    if kind not in alone:
        alone[kind] = _rate(first.ask(f"{kind} {ms}", _ANSWER_SECONDS))
    second.say(f"{other} {2 * ms}")
    time.sleep(ms / 4000)
    beside = _rate(first.ask(f"{kind} {ms}", _ANSWER_SECONDS))
    theirs = _rate(second.hear(_ANSWER_SECONDS))
    note = f"{alone[kind]:.0f} a second alone, {beside:.0f} beside {theirs:.0f} of the other"
    if host.simulated and "on_device" in pair:
        note = f"{note}; {_UNTOLD}"
    return measured(ITEM, _beside(mode, pair), beside / alone[kind] if alone[kind] else None, "ratio", note=note)


def _rate(answer: Mapping[str, object]) -> float:
    if "error" in answer:
        raise Unavailable(f"a process that works got {answer['error']}")
    return float(str(answer["per_second"]))
