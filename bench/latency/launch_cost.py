# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench launch`: what the agent's program costs at each launch, by the kernel's own count of its time.

The program alone stands on cuLaunchKernel of a copy of the simulated libcuda, and a real workload launches: seen
without a rule, under an online one, and under an offline one that never stops it. The kernel adds its own reading of
the clock to every program; the empty one shows how much that is. Builds and roles take turns in each round.

Then how fast a process launches, over the rate without any probe, where the driver's own part of a launch takes 2, 4
and 8 µs. It holds when no role costs more than 250 ns beyond the empty program.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
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
_DRIVER_US: Final = (2, 4, 8)
MOST_NS: Final = 250.0


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

    def enforce(self) -> None:
        """Neither agent nor guardian stands by; without a lease no rule would be looked at to its end."""
        control = ctypes.c_uint64 * (abi.size_of(self.bpf, "control") // 8)
        controls = self.bpf.map("controls", abi.U32, control)
        value = controls.get(abi.U32(0)) or control()
        value[0] = _FOREVER_NS  # lease_until_ns
        with suppress(KeyError):  # an older build
            value[abi.offset_of(self.bpf, "control", "rules") // 8] = 1
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
            build.enforce()
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


def launch_rate(node: Node, library: Path, build: Build | None, role: str, seconds: float) -> float:
    """Launches per second of a process of its own; `build`: whose program stands at the call, or none."""
    cpus, summary = Cpus.split(), library.with_name("summary.json")
    arguments = [*LAUNCHING, "--seconds", str(seconds), "--json", str(summary)]
    with attached(build.bpf, library, build.functions) if build else nullcontext():
        process = node.start("offline", arguments, {"LD_LIBRARY_PATH": str(library.parent)})
        cpus.bind(process.pid, online=False)
        if build and (wanted := ROLES[role]) is not None:
            build.put_rule(process.pid, wanted)
        process.communicate(timeout=seconds + 60)
    return float(json.loads(summary.read_text())["kernels_per_second"])


def _after(launches: int, since: tuple[int, int]) -> tuple[int, int]:
    """The counts once the program ran so often since then."""
    until(lambda: runs()[0] - since[0] >= launches, "launches", 120, error=SetupError)
    return runs()


def measured(node: Node, library: Path, loaded: Sequence[Build], launches: int) -> dict[tuple[str, str], float]:
    """One round."""
    return {
        (build.name, role): program_ns(node, library, build, role, launches) for build in loaded for role in build.roles
    }


@contextmanager
def own_library() -> Iterator[tuple[Path, Path]]:
    """A copy of the simulated libcuda that no other process maps, and a folder."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-launches-") as name:
        library = Path(name) / "lib" / _LIBRARY.name
        library.parent.mkdir()
        shutil.copyfile(_LIBRARY, library)
        yield library, Path(name)


def rows(before: Path | None, rounds: int, launches: int) -> list[dict[str, Any]]:
    """What the program takes: medians of the rounds, with least and most."""
    with (
        own_library() as (library, folder),
        simulated_node(folder / "gpu") as node,
        statistics(),
        builds(before) as loaded,
    ):
        Cpus.split().bind(node.server_tgid, online=True)
        found = [measured(node, library, loaded[:: 1 if n % 2 else -1], launches) for n in range(rounds)]
        keys = [(build.name, role) for build in loaded for role in build.roles]
    return [_row(key, [one[key] for one in found], launches) for key in keys]


def ratios(driver_us: int, before: Path | None, rounds: int, seconds: float) -> dict[tuple[str, str], list[float]]:
    """Launch rates over the rate without a probe in the same round, by program and role: median, least, most."""
    found: dict[tuple[str, str], list[float]] = {}
    with (
        own_library() as (library, folder),
        builds(before) as loaded,
        simulated_node(folder / "gpu", {"launch_cost": f"{driver_us}us"}) as node,
    ):
        Cpus.split().bind(node.server_tgid, online=True)
        for _ in range(rounds):
            bare = launch_rate(node, library, None, "observe", seconds)
            for build, role in ((one, role) for one in loaded for role in one.roles):
                rate = launch_rate(node, library, build, role, seconds)
                found.setdefault((build.name, role), []).append(rate / bare)
    return {key: [round(f(values), 3) for f in (median, min, max)] for key, values in found.items()}


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when the program costs no more than MOST_NS beyond the empty one, in any role."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.launch_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--launches", type=int, default=40_000, metavar="N", help="of each role and round")
    parser.add_argument("--seconds", type=float, default=2, metavar="S", help="of each launch rate; 0: none")
    parser.add_argument(
        "--before", type=Path, metavar="OBJECT", help="gpuwarden.bpf.o of another build, beside this one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")
    options = parser.parse_args(arguments)
    found = rows(options.before, options.rounds, options.launches)
    empty_ns = next(row["program_ns"] for row in found if row["program"] == "empty")
    costs = _DRIVER_US if options.seconds else ()
    rates = {cost: ratios(cost, options.before, options.rounds, options.seconds) for cost in costs}
    for row in found:
        key = (row["program"], row["role"])
        row["empty_ns"] = empty_ns
        row["launches_per_second_ratio"] = {str(cost): rates[cost][key] for cost in costs}
        row["beyond_empty_ns"] = round(row["program_ns"][0] - empty_ns[0], 1)
    Console(width=120).print(table(found))
    for row in found:
        shown = ", ".join(
            f"{m:g} ({a:g}–{b:g}) at {cost} µs" for cost, (m, a, b) in row["launches_per_second_ratio"].items()
        )
        print(
            f"{row['program']} {row['role']}: {row['beyond_empty_ns']:g} ns beyond the empty one; "
            f"launch rate to bare {shown or '–'}"
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": found}, indent=1) + "\n")
    return 0 if all(row["beyond_empty_ns"] <= MOST_NS for row in found if row["program"] == "this") else 1


if __name__ == "__main__":
    raise SystemExit(main())
