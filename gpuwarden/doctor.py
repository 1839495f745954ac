# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden doctor`: what works on this machine, what does not, and what to do about it. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import psutil

from agent import capabilities, preflight
from agent.containers.sources import BUILTIN
from agent.discovery import Discovery, host_libraries
from agent.elf import exported_functions
from agent.entries import Entry, entries
from agent.errors import ProbeError, SetupError, WardenError
from agent.model import ProbeStatus
from agent.names import printable
from agent.nvml import Nvml
from agent.probes import AttachedLibrary, Probes
from agent.procfs import Procfs


def examine(libcuda: Sequence[str], out: TextIO) -> int:
    """Prints one line per check; returns 0 when all of them passed, 3 otherwise."""
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("kernel", _machine),
        ("capabilities", _capabilities),
        ("PID namespace", _pids),
        ("GPUs", _gpus),
        ("libcuda", lambda: _libraries(libcuda)),
        ("probes", lambda: _probes(libcuda)),
        ("flame graphs", _flame_graphs),
        ("MPS", _mps),
        ("containers' names", _names),
    )
    failed = 0
    for name, check in checks:
        try:
            print(f"ok    {name}: {check()}", file=out)
        except WardenError as error:
            failed += 1
            print(f"FAIL  {name}: {error}", file=out)
    return 3 if failed else 0


def _machine() -> str:
    preflight.require_this_machine()
    return "new enough, with BTF"


def _capabilities() -> str:
    lacking = preflight.lacking_here()
    if lacking:
        raise SetupError("\n      ".join(map(capabilities.line, lacking)))
    return f"all that are needed: {', '.join(sorted(capabilities.held()))}"


def _pids() -> str:
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


def _probes(libcuda: Sequence[str]) -> str:
    proc = Procfs()
    with Probes(preflight.bpf_object(), proc) as probes:
        Discovery(probes, proc).attach_host(libcuda)
        libraries = probes.libraries()
        lines = [
            line
            for library in libraries
            for line in (*_library(library.status(), library.absent), *_beginnings(library))
        ]
        lines = lines or ["programs load; no library to attach to yet"]
        lines.append(f"      allocations that do not fit can be {'denied' if probes.can_deny else 'held, not denied'}")
    if any(library.failed for library in libraries):
        raise ProbeError("\n".join(lines))
    return "\n".join(lines)


def _flame_graphs() -> str:
    from agent.stacks.aside import Bcc

    try:
        Bcc().close()
    except SetupError:
        return "without names of functions: for those install bcc (Debian: apt-get install python3-bpfcc)"
    return "with names of functions, by bcc"


def _library(status: ProbeStatus, absent: Sequence[str]) -> Iterator[str]:
    """What of a library is seen, by role, and what is not."""
    yield f"{status.library}: {status.attached} of {status.attached + status.absent + status.failed} symbols"
    roles = (f"{role} {c.attached}/{c.attached + c.absent + c.failed}" for role, c in status.roles.items())
    yield f"      {', '.join(roles)}"
    if absent:
        yield f"      not in this library: {', '.join(absent)}"
    if status.unknown_versions:
        yield (
            f"      newer than this program, so not seen: {', '.join(status.unknown_versions)}; "
            "look for a newer release"
        )
    for symbol, why in status.failures.items():
        yield f"      FAILED {symbol}: {why}"


def _beginnings(library: AttachedLibrary) -> Iterator[str]:
    """What the probes of a library cost, by the instructions that they stand on. Nothing where that is not known."""
    try:
        offsets = exported_functions(library.path, "cu")
        found = entries(library.path, {name: offsets[name] for name in library.attached if name in offsets})
    except (ProbeError, OSError):  # that it cannot be read is said already
        return
    if None not in found.values():
        yield from beginnings(found)


def beginnings(found: Mapping[str, Entry | None]) -> Iterator[str]:
    """Of functions by name."""
    stepped = [name for name, entry in found.items() if entry is Entry.SINGLE_STEPPED]
    refused = [name for name, entry in found.items() if entry is Entry.REFUSED]
    emulated = len(found) - len(stepped) - len(refused)
    if found:
        yield f"      {emulated} of {len(found)} begin with an instruction that the kernel emulates: cheap to watch"
    if stepped:
        dear = "probes on these are dearer, in a virtual machine 10 µs a call, for their first instruction is stepped"
        yield f"      {dear}: {', '.join(stepped)}"
    if refused:
        yield f"      the kernel takes no probe on the first instruction of these, so not seen: {', '.join(refused)}"


def _names() -> str:
    here = [f"{socket.kind} at {socket.path}" for socket in BUILTIN if socket.present()]
    return ", ".join(here) or "no socket in the usual places: name it with gpuwarden run --names KIND=SOCKET"


def _mps() -> str:
    names = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
    found = [p.info for p in psutil.process_iter(["pid", "name", "exe"]) if _is_called(p.info, names)]
    if not found:
        return "not running: processes share GPUs by time slices"
    return ", ".join(f"{printable(info['name'])} (pid {info['pid']})" for info in found)


def _is_called(info: dict[str, Any], names: Sequence[str]) -> bool:
    """By its file where that can be read: the kernel cuts a process's name to 15 characters."""
    exe = str(info["exe"] or "").rpartition("/")[2]
    return any(exe == name or (not exe and name.startswith(info["name"] or "-")) for name in names)
