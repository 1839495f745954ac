# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who attacks in the hostile bench: the programs of tests/hostile/programs, kept up for as long as a phase lasts.

Each is a line of shell in a cgroup of its own, which gets one container's share of the CPU however many threads it has.
A machine is slower beside any program that burns CPU time, so an attacker is compared with `burn.c`, in as many threads
and in such a cgroup.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.node.elf import exported_functions
from tools.harness import cgroups, hostile_programs
from tools.harness.hostile_programs import PROGRAMS, compile_program
from tools.harness.node import BUILD, SIM, Node
from tools.harness.stage import Stage, Workload
from tools.harness.workloads import RESNET_LIKE

UNDER_A_RULE: Final = "tenants"  # the policy has an offline rule for the cgroups below this one …
WITHOUT_A_RULE: Final = "strangers"  # … and none for those below this one
USUAL_LADDER: Final = "gate, pace, hold, freeze"
_COMPILED: Final = (
    *("big_numbers", "claims", "crowd", "exec_again", "honest_launches", "short_lives", "stop_storm", "swallow_stops"),
)
_NOBODY: Final = 65534
_JOB: Final = shlex.join([*RESNET_LIKE, "--iterations-per-us", "100", "--seconds", "0"])
_REWRITTEN_FUNCTION: Final = "cuMemcpyPeer"  # it is probed, and the program does not call it
# The programs' standard input is at its end; that of those which wait for its end is NEVER, a FIFO.
_BEGIN: Final = """set -u; [ -z "$CPU_GROUP" ] || echo $$ >"$CPU_GROUP/cgroup.procs"
echo ready; exec </dev/null >/dev/null
sleep 0.2 # until it is bound to its CPU
py() { n=$1; shift; "$PYTHON" "$SCRIPTS/$n" "$@"; }
"""


@dataclass(frozen=True, slots=True)
class Attacker:
    """One attack. The script runs in the folder of the compiled programs."""

    name: str
    what: str
    script: str
    busy: int = 1  # threads that use as much of a CPU as they get
    place: str = WITHOUT_A_RULE
    on_gpu: bool = False  # works on the GPU; else it has a libcuda of its own that says success to everything
    listed: bool = False  # has a context on the GPU beside it ($RUN), so that NVML lists it and its rule is enforced
    http: bool = False  # the service's latency is read from HTTP, and this is a client of it
    head_start_seconds: float = 1.5
    ladder: str = USUAL_LADDER  # of its rule, where it has one


def _again(program: str, words: str, times: int) -> str:
    """The program does these over and over, in one process."""
    return f"$RUN ./{program} $(yes {shlex.quote(words)} | head -n {times})"


def _clients(count: int, way: str, connections: int = 1_000_000) -> str:
    """Each begins anew when it ends: the service may not be there yet."""
    client = f'py http_client.py {way} "$PORT" {connections} 0<>"$NEVER"'
    return f"for i in $(seq {count}); do while :; do {client}; sleep 0.2; done & done"


def _job(name: str, what: str, script: str, busy: int = 0, head_start_seconds: float = 1.5) -> Attacker:
    return Attacker(name, what, script, busy, UNDER_A_RULE, on_gpu=True, head_start_seconds=head_start_seconds)


_CHURN: Final = """
for i in $(seq 8); do (
    n=0
    while :; do
        n=$((n + 1)); copy=$PWD/churn/$i.$n; mkdir -p "$copy"; cp libcuda.so.1 "$copy"
        LD_LIBRARY_PATH=$copy timeout -s KILL 1 ./honest_launches 100
        rm -r "$copy"
    done) &
done; wait"""

_REWRITTEN: Final = """
copy=$PWD/rewritten.so; rm -f "$copy"; ./second_library path "$copy" &
until [ -s "$copy" ]; do sleep 0.1; done
sleep 1
while :; do
    for byte in $BYTES; do
        printf "$byte" | dd of="$copy" bs=1 seek="$OFFSET" conv=notrunc status=none; sleep 0.02
    done
done"""

ATTACKERS: Final = (
    Attacker("functions", "65,600 invented functions, again and again", _again("crowd", "functions", 2000)),
    Attacker("contexts", "8,300 contexts, most on invented devices, again", _again("crowd", "contexts", 5000)),
    Attacker(
        "threads", "5,000 threads, a launch each, again", "while :; do timeout -s KILL 2 $RUN ./crowd threads; done"
    ),
    Attacker("processes", "one short life after another, a launch in each", _again("crowd", "processes", 500)),
    Attacker(
        "sleepers",
        "4,200 processes at once, a launch in each",
        "while :; do timeout -s KILL 6 $RUN ./crowd sleepers; done",
    ),
    Attacker("five", "five processes that each invent 65,600 functions", _again("crowd", "five", 2000), 5),
    Attacker("events", "40,000 invented events, again and again", _again("crowd", "events", 5000)),
    Attacker("names", "4 threads that ask for invented functions", _again("crowd", "names", 100), 4),
    Attacker(
        "numbers",
        "sizes, graphs, grids and devices that there are not",
        _again("big_numbers", "sizes graph grids ordinals", 2000),
    ),
    Attacker("destroyed", "contexts that never were are destroyed", _again("big_numbers", "destroy", 2000)),
    Attacker(
        "parked",
        "4 allocations that never return",
        "for i in 1 2 3 4; do $RUN ./big_numbers park & done; wait",
        0,
        UNDER_A_RULE,
        listed=True,
    ),
    Attacker(
        "allocations",
        "allocates in a loop while another continues it",
        f"{_again('big_numbers', 'sizes', 2000)} & while kill -CONT $!; do :; done",
        2,
        UNDER_A_RULE,
        listed=True,
    ),
    Attacker("claims", "2 GiB, launches and copies of a process without a GPU", "$RUN ./claims", 0, UNDER_A_RULE),
    Attacker(
        "stops",
        "four processes whose stops others end",
        "for i in 1 2 3 4; do $RUN ./stop_storm 1000 & done; wait",
        8,
        UNDER_A_RULE,
        listed=True,
    ),
    Attacker("tracer", "stops that a tracer swallows", "$RUN ./swallow_stops 2000000000", 2, UNDER_A_RULE, listed=True),
    Attacker(
        "lives",
        "a chain of lives of 5 ms, of a process that has its rule",
        "(sleep 4; echo) | $RUN ./short_lives 100000 5",
        1,
        UNDER_A_RULE,
        listed=True,
        head_start_seconds=5.0,
    ),
    Attacker(
        "early lives", "the same, begun before it has", "$RUN ./short_lives 100000 5", 1, UNDER_A_RULE, listed=True
    ),
    Attacker(
        "programs",
        "one process that becomes its program anew every 5 ms",
        "$RUN ./exec_again 100000 5",
        1,
        UNDER_A_RULE,
    ),
    Attacker(
        "cgroups",
        "a cgroup of its own for each of its processes, 2,000 of them",
        "py many_cgroups.py 2000 $RUN ./honest_launches 100",
    ),
    Attacker("libraries", "8 processes, each with a new copy of libcuda a second", _CHURN, 8),
    Attacker(
        "scrapes",
        "silent and half requests to the agent's port",
        f'for way in mute half; do py crowd.py "$WEB" $way {_NOBODY} 0<>"$NEVER" & done; wait',
        2,
    ),
    _job("job", "for comparison: one more honest job", f'"$SIM/offline" {_JOB}'),
    _job("runc", "the same, of a process called runc", f'py called_runc.py runc "$SIM/offline" {_JOB}'),
    _job(
        "odd", "the same twice, under an odd command", f'(echo; sleep 1000) | py odd_command.py "$SIM/offline" {_JOB}'
    ),
    _job("mapped", "a libcuda mapped over the first", 'rm -f over.so; ./second_library over "$PWD/over.so"'),
    _job("rewritten", "a libcuda of which a byte is written every 20 ms", _REWRITTEN),
    _job("behind", "launches behind the exports of libcuda (`unprobed: freeze`)", "./past_stubs", 0, 6.0),
    _job("waits", "waits for an idle stream after each launch", "./idle_streams waits"),
    _job("captures", "captures into a stream that it does not use", "./idle_streams captures"),
    _job("linked", "libcuda linked in (`unprobed: freeze`)", "./static_library", head_start_seconds=6.0),
    Attacker("errors", "4 clients that ask for what is not there", f"{_clients(4, 'errors')}; wait", http=True),
    Attacker(
        "senders",
        "16 clients whose requests take a second to send",
        f"{_clients(8, 'slow_heads')}; {_clients(8, 'slow_bodies')}; wait",
        0,
        http=True,
    ),
    Attacker(
        "connections",
        "120 connections that say nothing, 40 with half a head",
        f"{_clients(1, 'idle', 120)}; {_clients(1, 'halves', 40)}; wait",
        0,
        http=True,
    ),
)


def build(folder: Path) -> None:
    """Everything that attackers run, in this folder."""
    folder.mkdir()
    hostile_programs.pretended_libcuda(folder)
    hostile_programs.second_library(folder)
    hostile_programs.static_library(folder)
    for name in ("past_stubs", "idle_streams"):
        hostile_programs.gpu_program(name, folder)
    for name in _COMPILED:
        compile_program(name, folder)
    source = Path(__file__).with_name("burn.c")
    subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", str(source), "-o", str(folder / "burn"), "-lpthread"], check=True)
    source = source.with_name("listed.c")
    include = f"-I{SIM / 'include'}"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", include, str(source), "-o", str(folder / "listed.so")], check=True
    )
    subprocess.run(["mkfifo", str(folder / "never")], check=True)


def attack(stage: Stage[Node], folder: Path, attacker: Attacker, ports: Mapping[str, int]) -> Workload:
    """Begins it. `ports`: of the service (PORT) and of the agent (WEB)."""
    library = BUILD / "lib" / "libcuda.so.1"
    offset = exported_functions(str(library), "cu")[_REWRITTEN_FUNCTION]
    byte = library.read_bytes()[offset]
    environment = {
        "CPU_GROUP": _cpu_group(stage, attacker.place),
        "PYTHON": sys.executable,
        "SCRIPTS": str(PROGRAMS),
        "SIM": str(BUILD / "bin"),
        "DRIVER": str(library),
        "NEVER": str(folder / "never"),
        "RUN": f"env LD_PRELOAD={folder / 'listed.so'}" if attacker.listed else "",
        "OFFSET": str(offset),
        "BYTES": f"\\{byte ^ 1:03o} \\{byte:03o}",
        "LD_LIBRARY_PATH": str(library.parent if attacker.on_gpu else folder),
        **{name: str(port) for name, port in ports.items()},
    }
    return stage.run(
        attacker.place, ["sh", "-c", f"{_BEGIN}cd {shlex.quote(str(folder))}; {attacker.script}"], environment
    )


def burn(stage: Stage[Node], folder: Path, attacker: Attacker) -> Workload:
    """Begins what uses CPU time as the attacker does, and nothing else."""
    command = ["sh", "-c", f'{_BEGIN}exec "$@"', "sh", str(folder / "burn"), str(attacker.busy)]
    return stage.run(attacker.place, command, {"CPU_GROUP": _cpu_group(stage, attacker.place)})


def _cpu_group(stage: Stage[Node], place: str) -> str:
    """A cgroup to enter, whose processes together get what one gets; "" where that of the container is one (v2)."""
    path = f"{stage.path}/{place}".lstrip("/")
    for root in cgroups.hierarchies():
        if "cpu" in root.name.split(","):
            (root / path).mkdir(parents=True, exist_ok=True)
            return str(root / path)
    root = cgroups.hierarchy()
    containers = root / path / "docker"
    containers.mkdir(parents=True, exist_ok=True)
    for folder in (*reversed(containers.parents), containers):
        if folder.is_relative_to(root):
            (folder / "cgroup.subtree_control").write_text("+cpu")
    return ""
