# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the agent's program costs at each launch, by the kernel's own count of its time; of one build or of two.

The program alone stands on cuLaunchKernel of a copy of the simulated libcuda, and a real workload launches: seen
without a rule, under an online one, and under an offline one that never stops it. The kernel adds its own reading of
the clock to every program; the empty one shows how much that is. Builds and roles take turns in each round.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.table import Table

from agent.core.errors import ProbeError, SetupError
from agent.node import preflight
from agent.node.elf import exported_extents
from agent.node.instructions import places
from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.abi import ORDINALS, ROLE_OFFLINE, ROLE_ONLINE, RULE_GATE, RULE_PACE, ProcessKey, Rule
from agent.probes.attachment import ProbedFunction
from agent.probes.libbpf import BpfObject, load_uprobes
from agent.probes.symbols import SYMBOLS
from bench.latency.watching import LAUNCHING
from tools.harness.node import BUILD, Node, simulated_node
from tools.harness.stage import Cpus
from tools.harness.uprobes import MEASURING, attached
from tools.harness.wait import until

PROGRAM: Final = "launch_enter"
FUNCTION: Final = "cuLaunchKernel"
ROLES: Final[Mapping[str, int | None]] = {"observe": None, "online": ROLE_ONLINE, "offline": ROLE_OFFLINE}
_LIBRARY: Final = BUILD / "lib" / "libcuda.so.1"
_STATISTICS_OF_TIME: Final = 0  # enum bpf_stats_type
_STREAM_BITS: Final = 0xFF << 24  # of the cookie; before there was a struct queued_streams they were the shape's
_FOREVER_NS: Final = 1 << 62
_WARM_LAUNCHES: Final = 5000


@dataclass(frozen=True, slots=True)
class Build:
    """One loaded object, and the program of it that is measured."""

    name: str
    bpf: BpfObject
    program: str
    cookie: int

    @property
    def roles(self) -> Sequence[str]:
        return tuple(ROLES) if self.program == PROGRAM else ("observe",)

    def functions(self, descriptor: int) -> list[ProbedFunction]:
        """Where the agent's probe stands."""
        extent = exported_extents(descriptor, "cu")[FUNCTION]
        place = places(descriptor, [extent])[extent.offset]
        return [ProbedFunction(FUNCTION, extent.offset, self.cookie, self.program, None, place)]

    def put_rule(self, tgid: int, role: int) -> None:
        """So that the launch is charged and looks at its gate, and is never stopped."""
        rule = Rule(
            role=role,
            flags=RULE_PACE | RULE_GATE,
            rate_ppm=1_000_000,
            max_queued_ns=_FOREVER_NS,
            launch_ns=2000,
            max_pause_ns=200_000_000,
        )
        rule.slots[:] = [0] * ORDINALS
        self.bpf.map("rules", ProcessKey, Rule).put(ProcessKey.of(Procfs().process_id(tgid)), rule)

    def renew_lease(self) -> None:
        """No guardian stands by; without one no rule would be looked at to its end."""
        control = ctypes.c_uint64 * (abi.size_of(self.bpf, "control") // 8)
        controls = self.bpf.map("controls", abi.U32, control)
        value = controls.get(abi.U32(0)) or control()
        value[0] = _FOREVER_NS  # lease_until_ns
        controls.put(abi.U32(0), value)


@contextmanager
def builds(before: Path | None) -> Iterator[list[Build]]:
    """The empty program, the agent's, and that of another build."""
    (symbol,) = (symbol for symbol in SYMBOLS if symbol.name == FUNCTION)
    with ExitStack() as stack:
        empty = stack.enter_context(load_uprobes(MEASURING / "empty.bpf.o", {"empty"}))
        loaded = [Build("empty", empty, "empty", 1)]
        for name, path in (("this", preflight.bpf_object()), ("before", before)):
            if path is not None:
                bpf = stack.enter_context(load_uprobes(path, {PROGRAM}))
                abi.check(bpf, {"rule": Rule, "process_id": ProcessKey})
                loaded.append(Build(name, bpf, PROGRAM, _cookie(bpf, symbol.cookie(1))))
        for build in loaded[1:]:
            build.renew_lease()
        yield loaded


def _cookie(bpf: BpfObject, cookie: int) -> int:
    try:
        abi.size_of(bpf, "queued_streams")
    except ProbeError:
        return cookie & ~_STREAM_BITS
    return cookie


@contextmanager
def statistics() -> Iterator[None]:
    """The kernel counts runs of BPF programs, and their time. SetupError: not here."""
    library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    descriptor = library.bpf_enable_stats(_STATISTICS_OF_TIME)
    if descriptor < 0:
        raise SetupError(f"the kernel keeps no statistics of BPF programs: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(descriptor)


def runs() -> tuple[int, int]:
    """How often this process's BPF programs ran so far, and for how many ns: one of them is attached at a time."""
    count = spent_ns = 0
    for path in Path("/proc/self/fdinfo").iterdir():
        try:
            fields = dict(re.findall(r"^(run_cnt|run_time_ns):\s*(\d+)$", path.read_text(), re.MULTILINE))
        except FileNotFoundError:  # that of the listing itself
            continue
        count += int(fields.get("run_cnt", 0))
        spent_ns += int(fields.get("run_time_ns", 0))
    return count, spent_ns


def program_ns(node: Node, library: Path, build: Build, role: str, launches: int) -> float:
    """Mean time of the program in so many launches of a process of its own."""
    cpus = Cpus.split()
    process = node.start("offline", [*LAUNCHING, "--seconds", "600"], {"LD_LIBRARY_PATH": str(library.parent)})
    try:
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise SetupError("the workload did not start")
        cpus.bind(process.pid, online=False)
        if (wanted := ROLES[role]) is not None:
            build.put_rule(process.pid, wanted)
        with attached(build.bpf, library, build.functions):
            first = _after(_WARM_LAUNCHES, runs())
            last = _after(launches, first)
        return (last[1] - first[1]) / (last[0] - first[0])
    finally:
        process.kill()


def _after(launches: int, since: tuple[int, int]) -> tuple[int, int]:
    """The counts once the program ran so often since then."""
    until(lambda: runs()[0] - since[0] >= launches, "launches", 120, error=SetupError)
    return runs()


def measured(node: Node, library: Path, loaded: Sequence[Build], launches: int) -> dict[tuple[str, str], float]:
    """One round."""
    return {
        (build.name, role): program_ns(node, library, build, role, launches) for build in loaded for role in build.roles
    }


def rows(before: Path | None, rounds: int, launches: int) -> list[dict[str, Any]]:
    """Medians of the rounds, with least and most."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-launches-") as name:
        library = Path(name) / "lib" / _LIBRARY.name
        library.parent.mkdir()
        shutil.copyfile(_LIBRARY, library)
        with simulated_node(Path(name) / "gpu") as node, statistics(), builds(before) as loaded:
            Cpus.split().bind(node.server_tgid, online=True)
            found = [measured(node, library, loaded[:: 1 if n % 2 else -1], launches) for n in range(rounds)]
            keys = [(build.name, role) for build in loaded for role in build.roles]
    return [_row(key, [one[key] for one in found], launches) for key in keys]


def _row(key: tuple[str, str], values: Sequence[float], launches: int) -> dict[str, Any]:
    figures = [round(value, 1) for value in (median(values), min(values), max(values))]
    return {"program": key[0], "role": key[1], "program_ns": figures, "launches": launches, "rounds": len(values)}


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Of all programs and roles."""
    made = Table("program", "role", "ns (least–most)", title=f"the program at {FUNCTION}, per launch")
    for one in found:
        middle, least, most = one["program_ns"]
        made.add_row(one["program"], one["role"], f"{middle:.0f} ({least:.0f}–{most:.0f})")
    return made
