# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Through which functions of the driver library frameworks work, and whether the agent's probes are on all of them.

Counting probes stand on everything that may launch, allocate, copy or wait. All programs get ready side by side; then
each does known things while the others wait, so that what is counted in between is its own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from conformance.clients.json_client import PROGRAMS, JsonClient, NoAnswerError
from conformance.host import Host, Unavailable
from conformance.report.model import Figure, Row, Verdict, failed, skipped

if TYPE_CHECKING:
    from conformance.checks.probes.hits import Hits

TITLE: Final = "Which functions of libcuda frameworks call, and whether the probes see them all"
SECONDS: Final = 80
LEAST_SECONDS: Final = 50
ITEM: Final = "frameworks"
WHAT: Final = (
    "counting probes on libcuda",
    "{framework}",
    "{framework}: version",
    "{framework}: launch functions called",
    "{framework}: memory functions called",
    "{framework}: launches counted per launch made",
    "{framework}: graph launches counted per graph launch made",
    "{framework}: copies counted per copy made",
    "{framework}: memsets counted per memset made",
    "{framework}: allocations counted per allocation made",
    "{framework}: frees counted per free made",
    "{framework}: waits counted per wait made",
    "{framework}: functions called that no probe is on",
    "{framework}: functions called that change what a graph was counted to hold",
)
_READY_SECONDS: Final = 60.0  # from the item's start; a cold disk takes long for the frameworks' libraries
_READY_RATIO: Final = 0.75  # of the time that the item has, at most
_PHASE_SECONDS: Final = 15.0
_CACHES: Final = ("TRITON_CACHE_DIR", "CUPY_CACHE_DIR")  # else what they compile stays in the user's home
_NO_COMPILER: Final = re.compile(r"Failed to find C compiler|libnvrtc")  # Triton needs the one, CuPy the other
_SIBLINGS: Final = {"PYTHONSAFEPATH": ""}  # the programs share calls_protocol.py, which lies beside them
_EXACT: Final = ("launches", "graph launches")  # what the agent's work rests on; of others a framework may do more
_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Framework:
    """A program and its phases. The second name of a phase is the one that CUPTI watches, for how often it did what."""

    name: str
    module: str
    command: tuple[str, ...]
    phases: Mapping[str, tuple[str, ...]]  # by what the rows call it
    extra: Mapping[str, str]


def frameworks() -> tuple[Framework, ...]:
    """All frameworks that are checked, besides our own workloads."""
    memory = {"memory": ("memory",)}
    torch = ("calls_torch.py", "memory")
    return (
        Framework(
            "PyTorch",
            "torch",
            ("calls_torch.py",),
            {
                "eager": ("eager", "eager, profiled"),
                "CUDA graphs": ("graphs",),
                "copies": ("copies", "copies, profiled"),
                "caching allocator": ("memory",),
            },
            {},
        ),
        Framework(
            "PyTorch, expandable segments",
            "torch",
            torch,
            memory,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
        Framework(
            "PyTorch, cudaMallocAsync", "torch", torch, memory, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
        ),
        Framework("Triton", "triton", ("calls_triton.py",), {"kernels": ("kernels",)}, {}),
        Framework("CuPy", "cupy", ("calls_cupy.py",), {n: (n,) for n in ("kernels", "graphs", "copies", "memory")}, {}),
        Framework("JAX", "jax", ("calls_jax.py",), {n: (n,) for n in ("kernels", "chains", "copies")}, {}),
    )


def rows(host: Host) -> Iterator[Row]:
    """Needs BPF. What a framework lacks is a row of its own."""
    deadline = time.monotonic() + min(_READY_SECONDS, _READY_RATIO * host.seconds)
    if host.libcuda is None:
        raise Unavailable("there is no libcuda.so.1 on this machine")
    if host.bpf is not None:
        raise Unavailable(f"nothing can count calls here: {host.bpf}")
    from conformance.checks.probes.hits import counting
    from conformance.checks.probes.objects import measuring_object

    built = measuring_object(host, "hits.bpf.o")
    with ExitStack() as stack:
        begun = [(one, _begin(host, one, stack)) for one in frameworks()]  # they import what they need meanwhile
        hits = stack.enter_context(counting(built, host.libcuda))
        yield _counting_row(hits)
        ready: list[tuple[Framework, JsonClient | Row]] = [(one, _ready(one, talk, deadline)) for one, talk in begun]
        yield from _workloads(host, hits)
        for one, talk in ready:
            yield from _of_framework(one, talk, hits, host.libcuda)
            if not isinstance(talk, Row):
                talk.end()


def _counting_row(hits: Hits) -> Row:
    return Row(
        item=ITEM,
        what="counting probes on libcuda",
        verdict=Verdict.DIFFERS if hits.failed else Verdict.MEASURED,
        figure=len(set(hits.names) - hits.failed.keys()),
        baseline=len({*hits.names, *hits.failed}),
        note="; ".join(f"{name}: {why}" for name, why in list(hits.failed.items())[:5]),
    )


def _begin(host: Host, framework: Framework, stack: ExitStack) -> JsonClient | Row:
    if not host.has(framework.module):
        return skipped(ITEM, framework.name, f"{host.python} has no {framework.module}")
    script, *arguments = framework.command
    command = [host.python, str(PROGRAMS / script), *arguments]
    caches = {variable: str(host.folder / variable.lower()) for variable in _CACHES}
    try:
        name = framework.name.replace(", ", "-").replace(" ", "-")
        return stack.enter_context(JsonClient(host, name, command, {**_SIBLINGS, **caches, **framework.extra}))
    except OSError as error:
        return failed(ITEM, framework.name, f"it did not start: {error}")


def _ready(framework: Framework, talk: JsonClient | Row, deadline: float) -> JsonClient | Row:
    """The conversation after its first words, which are kept, or what came instead."""
    if isinstance(talk, Row):
        return talk
    try:
        talk.greeting = talk.hear_json(max(1.0, deadline - time.monotonic()))
    except NoAnswerError as silent:
        talk.end()  # it is not to call anything while others are counted
        row = skipped if _NO_COMPILER.search(str(silent)) else failed
        return row(ITEM, framework.name, f"it did not get ready: {silent}")
    return talk


def other_libcuda(pid: int, libcuda: Path) -> str:
    """The driver library that a process has mapped, if it is not this one; "" where it is, or none can be seen."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return ""
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libcuda.so" in line}
    for path in sorted(paths):
        with suppress(OSError):  # it was replaced meanwhile
            if not os.path.samefile(path, libcuda):
                return path
    return ""


def _of_framework(framework: Framework, talk: JsonClient | Row, hits: Hits, libcuda: Path) -> Iterator[Row]:
    if isinstance(talk, Row):
        yield talk
        return
    about = ", ".join(f"{key} {value}" for key, value in talk.greeting.get("about", {}).items())
    other = other_libcuda(talk.process.pid, libcuda)
    yield _row(
        f"{framework.name}: version",
        Verdict.DIFFERS if other else Verdict.MEASURED,
        about,
        f"it uses {other}, and {libcuda} is what was probed" if other else "",
    )
    for name, phases in framework.phases.items():
        called = framework.name if len(framework.phases) == 1 else f"{framework.name}, {name}"
        try:
            yield from _of_phase(called, phases, talk, hits)
        except NoAnswerError as silent:  # what it says later would be taken for another answer
            yield failed(ITEM, called, str(silent))
            return


def _of_phase(called: str, phases: Sequence[str], talk: JsonClient, hits: Hits) -> Iterator[Row]:
    """What is called is counted in the first of the phases; how often things were done, the last one knows best."""
    from conformance.checks.probes.hits import between

    before = hits.read()
    answer = talk.ask(phases[0], _PHASE_SECONDS)
    seen = between(before, hits.read())
    made, note = dict(answer.get("did", {})), ""
    if "failed" in answer:
        yield failed(ITEM, called, str(answer["failed"]))
        return
    for phase in phases[1:]:
        answer = talk.ask(phase, _PHASE_SECONDS)
        if any(answer.get("did", {}).get(kind) for kind in ("launches", "copies")):
            made |= {kind: count for kind, count in answer["did"].items() if count}
            note = "made: as CUPTI saw it"
        else:
            note = f"CUPTI saw nothing; {answer.get('failed', '')}".rstrip("; ")
    yield from phase_rows(called, seen, made, note)
    if len(phases) > 1 and not made:
        yield skipped(ITEM, f"{called}: launches counted per launch made", note)


def phase_rows(called: str, seen: Mapping[str, int], made: Mapping[str, int], note: str = "") -> Iterator[Row]:
    """Functions that were called, how many of what was made the agent would have counted, and what it would not see."""
    from conformance.checks.probes.hits import KINDS, counted, graph_changes, kind_of, unprobed

    for what, kinds in (("launch", KINDS[:2]), ("memory", ("allocations", "frees"))):
        functions = {name: count for name, count in seen.items() if kind_of(name) in kinds}
        if functions or any(kind in made for kind in kinds):
            yield _row(f"{called}: {what} functions called", Verdict.MEASURED, _listed(functions))
    counts = counted(seen)
    for kind, count in made.items():
        if count:
            yield _ratio_row(called, kind, counts[kind], count, note)
    missed, changes = unprobed(seen), graph_changes(seen)
    known = missed.keys() | changes.keys()
    others = {name: count for name, count in seen.items() if kind_of(name) is None and name not in known}
    yield _row(
        f"{called}: functions called that no probe is on",
        Verdict.DIFFERS if missed else Verdict.OK,
        _listed(missed),
        f"nothing to count: {_listed(others)}" if others else "",
    )
    if changes or counts["graph launches"]:
        yield _changes_row(called, changes)


def _changes_row(called: str, changes: Mapping[str, int]) -> Row:
    """Whether the agent's kernels per launch of a graph may be wrong; its grids and bytes alone, or neither."""
    from conformance.checks.probes.hits import recounts

    verdict, note = Verdict.OK, ""
    if any(recounts(name) for name in changes):
        verdict, note = Verdict.DIFFERS, "a launch may run more or fewer kernels than the agent counts"
    elif changes:
        verdict, note = Verdict.MEASURED, "as many kernels as the agent counts, maybe with other grids, and other bytes"
    what = f"{called}: functions called that change what a graph was counted to hold"
    return _row(what, verdict, _listed(changes), note)


def _ratio_row(called: str, kind: str, counted: int, made: int, note: str) -> Row:
    ratio = counted / made
    holds = abs(ratio - 1) <= _TOLERANCE if kind in _EXACT else ratio >= 1 - _TOLERANCE
    singular = {"launches": "launch", "graph launches": "graph launch", "copies": "copy"}.get(kind, kind[:-1])
    return Row(
        item=ITEM,
        what=f"{called}: {kind} counted per {singular} made",
        verdict=Verdict.OK if holds else Verdict.DIFFERS,
        figure=ratio,
        unit="ratio",
        baseline=1.0,
        note=f"{counted} counted, {made} made" + (f"; {note}" if note else ""),
    )


def _workloads(host: Host, hits: Hits) -> Iterator[Row]:
    """Our own, which say what they launched."""
    steps, requests = (5, 5) if host.quick else (20, 20)
    short = ("--kernel-us", "20", "--blocks", "8", "--threads", "256", "--iterations-per-us", "100")
    offline = ("--kernels", "50", "--steps", str(steps), "--seconds", "20", "--copy-bytes", "64KiB", *short)
    online = ("--kernels", "10", "--requests", str(requests), "--rate", "200", "--start-now", *short)
    for name, program, arguments, graph in (
        ("our offline workload", "offline", offline, ()),
        ("our offline workload, graphs", "offline", offline, ("--graph", "7")),
        ("our online workload", "online", online, ()),
        ("our online workload, graphs", "online", online, ("--graph",)),
    ):
        yield from _of_workload(host, hits, name, program, (*arguments, *graph))


def _of_workload(host: Host, hits: Hits, name: str, program: str, arguments: Sequence[str]) -> Iterator[Row]:
    from conformance.checks.probes.hits import between

    summary = host.folder / "summary.json"
    before = hits.read()
    done = host.run([str(host.workloads / program), *arguments, "--json", str(summary)], timeout=_PHASE_SECONDS)
    seen = between(before, hits.read())
    if done.returncode:
        yield failed(ITEM, name, f"it ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
        return
    yield from phase_rows(name, seen, workload_made(json.loads(summary.read_text()), arguments))


def workload_made(summary: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, int]:
    """How often a workload did what, by its last line. In a graph, kernels are launched once to record it."""
    kernels = int(arguments[arguments.index("--kernels") + 1])
    if summary["program"] == "online":
        requests = int(summary["requests"])
        if "--graph" in arguments:
            return {"launches": kernels, "graph launches": requests, "waits": requests}
        return {"launches": kernels * requests, "waits": requests}
    steps = int(summary["steps"])
    made = {"copies": steps, "waits": steps, "allocations": 2}
    if "--graph" in arguments:
        nodes = int(arguments[arguments.index("--graph") + 1])
        return {"launches": nodes, "graph launches": int(summary["kernels"]) // nodes, **made}
    return {"launches": int(summary["kernels"]), **made}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _row(what: str, verdict: Verdict, figure: Figure, note: str = "") -> Row:
    return Row(item=ITEM, what=what, verdict=verdict, figure=figure, note=note)
