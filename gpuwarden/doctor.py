# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden doctor`: which parts work on this machine, and what to do about the others. Changes nothing."""

from __future__ import annotations

import argparse
import logging
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import psutil

from agent.containers.runtimes import BUILTIN
from agent.core.errors import ProbeError, SetupError, WardenError
from agent.core.model import ProbeCounts, ProbeStatus
from agent.core.text import printable
from agent.node import preflight
from agent.node.instructions import EntryInstruction, ProbePlace
from agent.node.procfs import Procfs
from agent.nvml.client import Nvml
from agent.probes.discovery import Discovery, host_libraries
from agent.probes.libcuda import AttachedLibrary, LibcudaProbes
from agent.probes.return_probes import ReturnProbes, why_off
from agent.probes.symbols import PROGRAMS, SYMBOLS, SymbolRole
from gpuwarden.options import LIBCUDA_HELP, add_return_probes

_PROBES_HELP = (
    "also list each probed function: where its probes stand, whether the kernel emulates the instruction there (cheap) "
    "or single-steps it, and how they are attached"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden doctor`."""
    parser.add_argument("--libcuda", action="append", default=[], metavar="FILE", help=LIBCUDA_HELP)
    parser.add_argument("--probes", action="store_true", help=_PROBES_HELP)
    add_return_probes(parser)


def act(options: argparse.Namespace) -> int:
    """0 when every check passed, 3 otherwise. Without --verbose nothing is logged: `examine` prints the warnings."""
    if not options.verbose:
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.CRITICAL)
    return examine(options.libcuda, sys.stdout, options.return_probes, each_probe=options.probes)


def examine(libcuda: Sequence[str], out: TextIO, returns: ReturnProbes, *, each_probe: bool) -> int:
    """Prints the lines of each check, and nothing else; returns 0 when all of them passed, 3 otherwise.

    What a check logs as a warning or error is printed below its line. `each_probe`: lists the probed functions, too.
    """
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("kernel", _kernel),
        ("capabilities", _capabilities),
        ("PID namespace", _pid_namespace),
        ("GPUs", _gpus),
        ("libcuda", lambda: _libraries(libcuda)),
        ("return probes", lambda: _return_probes(returns)),
        ("probes", lambda: _probes(libcuda, returns, each_probe)),
        ("stacks", _stacks),
        ("MPS", _mps),
        ("containers' names", _container_names),
        *((("CRIU", _criu),) if shutil.which("criu") else ()),
    )
    failed = 0
    for name, check in checks:
        with _collected_warnings() as warnings:
            try:
                lines = [f"ok    {name}: {check()}"]
            except (WardenError, OSError) as error:
                failed += 1
                lines = [f"FAIL  {name}: {error}"]
        print(*lines, *(f"      {warning}" for warning in warnings), sep="\n", file=out)
    return 3 if failed else 0


class _Collector(logging.Handler):
    """Keeps messages, each as one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(printable(record.getMessage()))


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """The messages that are logged inside the block at level WARNING or above, each as one line."""
    handler, root = _Collector(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.messages
    finally:
        root.removeHandler(handler)


def _kernel() -> str:
    preflight.require_kernel(platform.release())
    return "new enough, with BTF"


def _capabilities() -> str:
    lacking = preflight.lacking_here()
    if lacking:
        raise SetupError("\n      ".join(map(preflight.line, lacking)))
    return f"all that are needed: {', '.join(sorted(preflight.held()))}"


def _pid_namespace() -> str:
    if not preflight.has_the_nodes_pids():
        raise SetupError(preflight.OTHER_PIDS)
    return "the node's own"


def _gpus() -> str:
    with Nvml() as nvml:
        names = [f"{device.index}: {device.name}" for device in nvml.devices()]
    return ", ".join(names) or "none found: check nvidia-smi"


def _libraries(libcuda: Sequence[str]) -> str:
    return (
        ", ".join(host_libraries(libcuda)) or "none on the node itself; containers' own copies are found as they start"
    )


def _return_probes(choice: ReturnProbes) -> str:
    why = why_off(choice)
    return "attached, and processes under seccomp survive them" if why is None else f"off: {why}"


def _probes(libcuda: Sequence[str], returns: ReturnProbes, each: bool) -> str:
    proc = Procfs()
    with LibcudaProbes(preflight.bpf_object(), proc, why_off(returns)) as probes:
        Discovery(probes, proc).attach_host(libcuda)
        libraries = probes.libraries()
        lines: list[str] = []
        for library in libraries:
            found = _attached_places(library)
            lines += [*_library(library.status(), library.absent), *cost_lines(found)]
            lines += probe_lines(found, multi=probes.bpf.multi) if each else ()
        lines = lines or ["programs load; no library to attach to yet"]
        lines.append(f"      allocations that do not fit {_at_allocations(probes)}")
    if any(library.failed for library in libraries):
        raise ProbeError("\n".join(lines))
    return "\n".join(lines)


def _at_allocations(probes: LibcudaProbes) -> str:
    if probes.returns_off is not None:
        return "are not seen"
    return f"can be {'denied' if probes.can_deny else 'held, not denied'}"


def _stacks() -> str:
    from agent.stacks.symbolizer import Bcc

    try:
        Bcc().close()
    except SetupError as error:
        return f"without names of functions: {error}"
    return "with names of functions, by bcc"


def _library(status: ProbeStatus, absent: Sequence[str]) -> Iterator[str]:
    """The lines about a library's symbols: attached, absent, unknown and failed ones."""
    yield f"{status.library}: {status.attached} of {_all(status)} symbols"
    roles = (f"{role} {counts.attached}/{_all(counts)}" for role, counts in status.roles.items())
    yield f"      {', '.join(roles)}"
    if status.off:
        yield f"      {status.off} need return probes, which are off"
    if absent:
        yield f"      not in this library: {', '.join(absent)}"
    if status.unknown_versions:
        yield (
            f"      newer than this program, so not seen: {', '.join(status.unknown_versions)}; "
            "look for a newer release"
        )
    for symbol, why in status.failures.items():
        yield f"      FAILED {symbol}: {why}"


def _all(counts: ProbeStatus | ProbeCounts) -> int:
    return counts.attached + counts.absent + counts.failed + counts.off


def _attached_places(library: AttachedLibrary) -> dict[str, ProbePlace]:
    return {name: place for name, place in library.places.items() if name not in library.failed}


def cost_lines(places: Mapping[str, ProbePlace]) -> Iterator[str]:
    """The lines about where probes stand and what they cost. `places`: by function; nothing where one is unknown."""
    kinds = {place.instruction for place in places.values()}
    if not places or None in kinds:
        return
    by_kind = {kind: [name for name, place in places.items() if place.instruction is kind] for kind in EntryInstruction}
    cheap = by_kind[EntryInstruction.EMULATED]
    distances = Counter(places[name].distance for name in cheap)
    where = ", ".join(f"+{distance} ({count})" for distance, count in sorted(distances.items()))
    yield (
        f"      {len(cheap)} of {len(places)} probes are cheap, on an instruction that the kernel emulates"
        f"{f', so many bytes into their functions: {where}' if where else ''}"
    )
    if stepped := by_kind[EntryInstruction.SINGLE_STEPPED]:
        expensive = "these cost more, in a virtual machine 10 µs a call, as the kernel single-steps their instruction"
        yield f"      {expensive}: {', '.join(stepped)}"
    if refused := by_kind[EntryInstruction.REFUSED]:
        yield f"      the kernel takes no probe on the first instruction of these, so not seen: {', '.join(refused)}"


def probe_lines(places: Mapping[str, ProbePlace], *, multi: bool) -> Iterator[str]:
    """A line about each probed function. `places`: by function. `multi`: its probes are of uprobe_multi links."""
    if not places:
        return
    how = "attached together, by uprobe_multi" if multi else "each attached by a perf event of its own"
    yield f"      probed functions ({how}): role, probes, bytes into the function, the instruction there"
    roles = {symbol.name: symbol.role for symbol in SYMBOLS}
    name_width, role_width = max(map(len, places)), max(map(len, SymbolRole))
    for name, (distance, instruction) in places.items():
        probes = "entry, return" if PROGRAMS[roles[name]][1] else "entry"
        yield (
            f"        {name:{name_width}}  {roles[name]:{role_width}}  {probes:13}  +{distance:<2}  "
            f"{instruction or 'unknown'}"
        )


def _container_names() -> str:
    present = [f"{socket.kind} at {socket.path}" for socket in BUILTIN if socket.present()]
    return ", ".join(present) or "no socket in the usual places: name it with gpuwarden run --names KIND=SOCKET"


def _criu() -> str:
    return (
        "installed; it refuses processes that made a probed call, as their [uprobes] mapping stays, and saves those "
        "that have loaded libcuda with breakpoints in it, which end them where they are restored without the agent: "
        "checkpoint them before the agent runs or before they load libcuda (docs/operating.md, With CRIU)"
    )


def _mps() -> str:
    names = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
    found = [p.info for p in psutil.process_iter(["pid", "name", "exe"]) if _is_called(p.info, names)]
    if not found:
        return "not running: processes share GPUs by time slices"
    return ", ".join(f"{printable(info['name'])} (pid {info['pid']})" for info in found)


def _is_called(info: dict[str, Any], names: Sequence[str]) -> bool:
    """Whether a process runs one of these programs: by its executable where that can be read, as the kernel cuts a
    process's name to 15 characters."""
    exe = str(info["exe"] or "").rpartition("/")[2]
    return any(exe == name or (not exe and name.startswith(info["name"] or "-")) for name in names)
