# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about the cost of a hit: on small functions of ours, by their first instruction, and on one of libcuda's, at its
first instruction and where the agent puts its probes. All with empty programs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from conformance.checks.probes import machine_code
from conformance.clients.json_client import PROGRAMS, JsonClient, NoAnswerError
from conformance.host import Host, Unavailable
from conformance.report.model import Figure, Row, Verdict

if TYPE_CHECKING:
    from agent.probes.libbpf import BpfObject

ITEM: Final = "probes"
CALLED: Final = "cuCtxSynchronize"  # takes no arguments; before cuInit it returns at once
AT_FIRST: Final = f"{CALLED} of libcuda: a hit at its first instruction, empty program"
AT_PLACE: Final = f"{CALLED} of libcuda: a hit at the agent's place, empty program"
RETURN_AT_PLACE: Final = f"{CALLED} of libcuda: hits at the agent's place and at its return, empty programs"
OF_LIBCUDA: Final = (AT_FIRST, AT_PLACE, RETURN_AT_PLACE)
LIBRARY: Final = "libcuda.so.1"
READY_SECONDS: Final = 20.0
_CALLS, _CALLS_QUICK = 100_000, 5_000
_QUICK_FUNCTIONS: Final = ("push", "move")
_REPEATS: Final = 5  # of which the fastest is believed: all that disturbs makes it slower


def hits(host: Host, built: Path) -> Iterator[Row]:
    if platform.machine() != "x86_64":
        raise Unavailable(f"the small functions are machine code of x86-64; this is {platform.machine()}")
    from agent.probes.libbpf import load_uprobes

    code = host.folder / "code"
    places = machine_code.write(code)
    command = [sys.executable, str(PROGRAMS / "calling.py"), str(code), str(places["loop"])]
    with load_uprobes(built, {"empty"}) as bpf, JsonClient(host, "calling", command) as calling:
        try:
            calling.hear(READY_SECONDS)
        except NoAnswerError as silent:
            raise Unavailable(f"code of our own cannot be run from {host.folder}: {silent}") from None
        calls = _CALLS_QUICK if host.quick else _CALLS
        names = _QUICK_FUNCTIONS if host.quick else tuple(machine_code.FUNCTIONS)
        yield from _entry_rows(bpf, calling, code, {name: places[name] for name in names}, calls)
        yield from _return_rows(bpf, calling, code, places["push"], calls)


def hits_of_libcuda(host: Host, built: Path) -> Iterator[Row]:
    """On a copy: no other process's calls meet these probes."""
    if host.libcuda is None:
        raise Unavailable("there is no libcuda.so.1 on this machine")
    if platform.machine() != "x86_64":
        raise Unavailable(f"what calls it is machine code of x86-64; this is {platform.machine()}")
    from agent.node.elf import exported_extents
    from agent.node.instructions import entry_here, places
    from agent.probes.libbpf import load_uprobes

    code, library = host.folder / "loop", host.folder / LIBRARY
    loop = machine_code.write(code, {})["loop"]
    shutil.copy(host.libcuda, library)
    with library.open("rb") as stream:
        extents = exported_extents(stream.fileno(), "cu")
        place = places(stream.fileno(), extents.values())[extents[CALLED].offset]
        first = entry_here(os.pread(stream.fileno(), 16, extents[CALLED].offset)) or "unknown"
    entry, cheap = extents[CALLED].offset, extents[CALLED].offset + place.distance
    command = [sys.executable, str(PROGRAMS / "calling.py"), str(code), str(loop), str(library)]
    with load_uprobes(built, {"empty"}) as bpf, JsonClient(host, "calling", command) as calling:
        calling.hear(READY_SECONDS)
        calls = _CALLS_QUICK if host.quick else _CALLS
        bare, _ = _call_ns(calling, CALLED, calls)
        for what, at, at_return, note in (
            (AT_FIRST, entry, (False,), f"{first}"),
            (AT_PLACE, cheap, (False,), f"{place.instruction or 'unknown'}, +{place.distance}"),
            (RETURN_AT_PLACE, cheap, (True, False), f"{place.instruction or 'unknown'}, +{place.distance}"),
        ):
            with _attached(bpf, library, at, at_return):
                probed, _ = _call_ns(calling, CALLED, calls)
            yield row(what, Verdict.MEASURED, round(probed - bare), "ns", note=f"{note}; {bare:.0f} ns without")


def _entry_rows(
    bpf: BpfObject, calling: JsonClient, code: Path, places: Mapping[str, int], calls: int
) -> Iterator[Row]:
    """A hit of each instruction; whether the kernel stepped it as agent.node.instructions says."""
    from agent.node.instructions import entry_here

    expected = {name: entry_here(machine_code.FUNCTIONS[name]) for name in places}
    costs: dict[bool, list[float]] = {True: [], False: []}
    for name, place in places.items():
        bare, _ = _call_ns(calling, place, calls)
        with _attached(bpf, code, place, at_return=(False,)):
            probed, stepped = _call_ns(calling, place, calls)
        costs[stepped].append(probed - bare)
        seen = "single-stepped" if stepped else "emulated"
        yield row(f"{name}: a hit, empty program", Verdict.MEASURED, round(probed - bare), "ns", note=seen)
        yield row(
            f"{name}: stepped by the kernel as expected",
            Verdict.OK if seen == expected[name] else Verdict.DIFFERS,
            seen,
            baseline=str(expected[name] or "not known"),
        )
    ratio = round(median(costs[True]) / median(costs[False]), 2) if costs[True] and costs[False] else None
    yield row("single-stepped per emulated hit", Verdict.MEASURED, ratio, "ratio")


def _return_rows(bpf: BpfObject, calling: JsonClient, code: Path, place: int, calls: int) -> Iterator[Row]:
    bare, _ = _call_ns(calling, place, calls)
    for what, at_return in (
        ("at its return alone, empty program", (True,)),
        ("at entry and return, empty programs", (True, False)),
    ):
        with _attached(bpf, code, place, at_return=at_return):
            probed, _ = _call_ns(calling, place, calls)
        yield row(f"push: a hit {what}", Verdict.MEASURED, round(probed - bare), "ns")


@contextmanager
def _attached(bpf: BpfObject, code: Path, place: int, at_return: Sequence[bool]) -> Iterator[None]:
    links = []
    try:
        for one in at_return:
            links += bpf.attach_uprobes("empty", str(code), [(place, 0)], at_return=one)
        yield
    finally:
        for link in links:
            bpf.detach(link)


def _call_ns(calling: JsonClient, place: int | str, calls: int) -> tuple[float, bool]:
    """The fastest of several; whether the kernel stepped an instruction. NoAnswerError."""
    found = [calling.ask(f"{place} {calls // _REPEATS}", READY_SECONDS) for _ in range(_REPEATS)]
    for one in found:
        if "failed" in one:
            raise NoAnswerError(str(one["failed"]))
    return min(float(one["ns"]) for one in found), any(bool(one["stepped"]) for one in found)


def row(what: str, verdict: Verdict, figure: Figure, unit: str = "", *, baseline: Figure = None, note: str = "") -> Row:
    """A row of this item."""
    return Row(item=ITEM, what=what, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=note)
