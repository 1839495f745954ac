# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What probes cost: a hit, attaching and taking away all of them, and launches beside the agent.

A hit is measured on small functions of ours, which begin with the instructions that functions begin with; launches on
an offline workload, by turns with a copy of libcuda without probes, one with empty programs, and the agent's.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from conformance.checks.probes.cost import ITEM, LIBRARY, OF_LIBCUDA, READY_SECONDS, hits, hits_of_libcuda, row
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, measured, part

if TYPE_CHECKING:
    pass

TITLE: Final = "What probes cost"
SECONDS: Final = 45
LEAST_SECONDS: Final = 27
_EMPTY: Final = "an empty kernel takes"
SURVIVES: Final = "a process under seccomp survives return probes on this kernel"
WHAT: Final = (
    "uprobe_multi links",
    "the BPF object loads",
    "all probes are attached",
    "all probes are taken away",
    "a hit costs",
    "{instruction}: a hit, empty program",
    "{instruction}: stepped by the kernel as expected",
    "push: a hit at its return alone, empty program",
    "push: a hit at entry and return, empty programs",
    "single-stepped per emulated hit",
    *OF_LIBCUDA,
    SURVIVES,
    "launches",
    _EMPTY,
    "launches per second, no probes",
    "launches per second, empty programs",
    "launches per second, the agent",
    "launch rate, empty programs per no probes",
    "launch rate, the agent per no probes",
    "launch rate, the agent per empty programs",
    "a launch takes longer by, empty programs",
    "a launch takes longer by, the agent",
)
_ROOT: Final = Path(__file__).resolve().parents[3]
_ROUNDS, _ROUNDS_QUICK = 5, 1
_LAUNCH_SECONDS, _LAUNCH_SECONDS_QUICK = 0.4, 0.1
_AT_THE_LIMIT: Final = 1.2  # launches that come no further apart than so many of the smallest kernels wait for the GPU
# Kernels that end sooner than the next can be launched: the host's part of a launch is what is measured.
_SHORT: Final = ("--kernel-us", "0.1", "--iterations-per-us", "1")
_MODES: Final = {"bare": "no probes", "empty": "empty programs", "watched": "the agent"}


def rows(host: Host) -> Iterator[Row]:
    """Needs BPF. Without a driver library the costs of hits are measured all the same."""
    if host.bpf is not None:
        raise Unavailable(f"no probe can be attached here: {host.bpf}")
    from conformance.checks.probes.objects import measuring_object

    built = measuring_object(host, "empty.bpf.o")
    for whats, found in (
        (("all probes are attached",), _attaching),
        (("a hit costs",), hits),
        (OF_LIBCUDA, hits_of_libcuda),
        ((SURVIVES,), _seccomp),
        (("launches",), _launches),
    ):
        yield from part(ITEM, whats, partial(found, host, built))


def _attaching(host: Host, built: Path) -> Iterator[Row]:
    """The agent's own probes, as it attaches them."""
    from agent.node.procfs import Procfs
    from agent.probes.libbpf import load_uprobes
    from agent.probes.libcuda import LibcudaProbes

    with load_uprobes(built, {"empty"}) as bpf:
        multi = bpf.multi
    why = "" if multi else "the kernel has none (Linux < 6.6): probes are attached one by one"
    yield row("uprobe_multi links", Verdict.OK if multi else Verdict.DIFFERS, multi, baseline=True, note=why)
    begun = time.perf_counter()
    with LibcudaProbes(host.bpf_objects / "gpuwarden.bpf.o", Procfs()) as probes:
        note = "allocations can be denied" if probes.can_deny else "the kernel lets probes change no registers"
        yield row("the BPF object loads", Verdict.MEASURED, _ms(begun), "ms", note=note)
        if host.libcuda is None:
            raise Unavailable("there is no libcuda.so.1 on this machine")
        begun = time.perf_counter()
        library = probes.ensure(str(host.libcuda))
        took = _ms(begun)
        problems = "; ".join(f"{name}: {why}" for name, why in list(library.failed.items())[:3])
        yield row(
            "all probes are attached",
            Verdict.DIFFERS if library.failed else Verdict.MEASURED,
            took,
            "ms",
            note=problems or f"{len(library.attached)} functions",
        )
        begun = time.perf_counter()
        probes.drop(library)
        yield row("all probes are taken away", Verdict.MEASURED, _ms(begun), "ms")


def _ms(begun: float) -> float:
    return round((time.perf_counter() - begun) * 1e3, 3)


def _seccomp(host: Host, built: Path) -> Iterator[Row]:
    """The trial that the agent makes before it attaches return probes."""
    from agent.probes.return_probes import danger

    why = danger()
    yield row(SURVIVES, Verdict.DIFFERS if why else Verdict.OK, why is None, baseline=True, note=why or "")


def _launches(host: Host, built: Path) -> Iterator[Row]:
    """By turns, so that what else changes on the machine hits all alike."""
    if host.libcuda is None:
        raise Unavailable("there is no libcuda.so.1 on this machine")
    count, seconds = (_ROUNDS_QUICK, _LAUNCH_SECONDS_QUICK) if host.quick else (_ROUNDS, _LAUNCH_SECONDS)
    found: dict[str, list[float]] = {mode: [] for mode in _MODES}
    first = 0 if host.quick else -1  # that one is for caches, clocks and whatever else has to wake
    with _libraries(host, host.libcuda, built) as folders:
        for number in range(first, count):
            for mode in list(_MODES)[:: 1 if number % 2 else -1]:
                rate = _launches_per_second(host, folders[mode], seconds)
                if number >= 0:
                    found[mode].append(rate)
    (kernel,) = part(ITEM, (_EMPTY,), partial(_smallest_kernel, host))
    yield kernel
    kernel_ns = kernel.figure if isinstance(kernel.figure, float) else None
    yield from launch_rows(found, claimed=not host.simulated, kernel_ns=kernel_ns)


def _smallest_kernel(host: Host) -> Iterator[Row]:
    """The shortest kernel: launches cannot be faster for long than the GPU takes them."""
    from conformance.checks.enforcement.constants import constants

    figures = {constant.key: figure for constant, figure in constants(host, quick=True)}
    yield measured(ITEM, _EMPTY, figures["smallest_kernel_ns"], "ns", note="from one to the next, all of them queued")


def launch_rows(
    rates: Mapping[str, Sequence[float]], *, claimed: bool, kernel_ns: float | None = None
) -> Iterator[Row]:
    """Rates of the same rounds by mode: medians, and medians of what they are to each other in a round.

    What the bench `watching` claims is of launches that take as long as real ones; simulated ones take a third of it.
    Where the GPU takes no more kernels of `kernel_ns` than come without probes, what a probe costs is hidden in part.
    """
    from bench.latency.watching import LEAST_RATIO

    hidden = kernel_ns is not None and 1e9 / median(rates["bare"]) <= _AT_THE_LIMIT * kernel_ns
    limit = f"the GPU, which takes a kernel each {kernel_ns:.0f} ns, hides a part" if hidden else ""
    spread = {mode: f"{min(rates[mode]):.0f} to {max(rates[mode]):.0f} in {len(rates[mode])} rounds" for mode in _MODES}
    for mode, called in _MODES.items():
        rate = round(median(rates[mode]))
        yield row(f"launches per second, {called}", Verdict.MEASURED, rate, "1/s", note=spread[mode])
    for mode, other in (("empty", "bare"), ("watched", "bare"), ("watched", "empty")):
        ratio = round(median(a / b for a, b in zip(rates[mode], rates[other], strict=True)), 4)
        judged = claimed and other == "empty" and not hidden
        verdict = (Verdict.OK if ratio >= LEAST_RATIO else Verdict.DIFFERS) if judged else Verdict.MEASURED
        what = f"launch rate, {_MODES[mode]} per {_MODES[other]}"
        yield row(what, verdict, ratio, "ratio", baseline=LEAST_RATIO if judged else 1.0, note=limit)
    for mode in ("empty", "watched"):
        longer = median(1e9 / a - 1e9 / b for a, b in zip(rates[mode], rates["bare"], strict=True))
        yield row(f"a launch takes longer by, {_MODES[mode]}", Verdict.MEASURED, round(longer), "ns", note=limit)


def _launches_per_second(host: Host, folder: Path, seconds: float) -> float:
    """Launch rate of a workload that finds its libcuda in the folder."""
    from bench.latency.watching import LAUNCHING

    summary = host.folder / "launches.json"
    arguments = [*LAUNCHING, *_SHORT]
    environment = {"LDLIBRARY_PATH": ":".join([str(folder), *_library_path(host)])}
    command = [str(host.workloads / "offline"), *arguments, "--seconds", str(seconds), "--json", str(summary)]
    done = host.run(command, environment, timeout=READY_SECONDS + seconds)
    if done.returncode:
        raise Unavailable(f"offline ended with status {done.returncode}: {done.stderr.strip()[-200:]}")
    return float(json.loads(summary.read_text())["kernels_per_second"])


def _library_path(host: Host) -> list[str]:
    """Where the driver's other libraries are found, with a copy of libcuda too."""
    path = host.environment.get("LDLIBRARY_PATH", os.environ.get("LDLIBRARY_PATH", ""))
    own = [str(host.libcuda.parent)] if host.libcuda else []
    return [*(folder for folder in path.split(":") if folder), *own]


@contextmanager
def _libraries(host: Host, libcuda: Path, built: Path) -> Iterator[Mapping[str, Path]]:
    """Folders with a libcuda each: one without a probe, one with empty programs, and the one that the agent watches."""
    from bench.latency.watching import empty_probes

    folders = {mode: host.folder / mode for mode in _MODES}
    for folder in folders.values():
        folder.mkdir()
    for mode in ("bare", "empty"):
        shutil.copy(libcuda, folders[mode] / LIBRARY)
    (folders["watched"] / LIBRARY).symlink_to(libcuda)
    with ExitStack() as stack:
        stack.enter_context(empty_probes(folders["empty"] / LIBRARY, built))
        stack.enter_context(_agent(host, libcuda))
        yield folders


@contextmanager
def _agent(host: Host, libcuda: Path) -> Iterator[None]:
    """It observes, with probes on this file and no other: not on the copies. Unavailable when it does not start."""
    from agent.core.errors import SetupError
    from tools.harness import agents

    folder, log = host.folder / "agent", host.folder / "agent.log"
    folder.mkdir()
    try:
        agents.require_no_policy()
    except SetupError as error:
        raise Unavailable(str(error)) from error
    with log.open("wb") as out:
        where = ["--run-dir", folder, "--usage", "off", "--libcuda", libcuda]
        agent = host.start(agents.command(*where, isolated=True), cwd=_ROOT, stdout=out, stderr=out)
    try:
        try:
            agents.wait_until_ready(agent, log, READY_SECONDS)
        except SetupError as error:
            raise Unavailable(str(error)) from error
        yield
    finally:
        host.end(agent)
