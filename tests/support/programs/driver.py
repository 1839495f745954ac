# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs whose every driver call is known (driver.c), and what the probes' maps hold about them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import COPY_DIRECTIONS, LATENCY_FIRST_POWER, LATENCY_SUB_BITS, MEMORY_KINDS, ProcessKey, Wake
from agent.probes.libbpf import RingBuffer
from agent.probes.libcuda import LibcudaProbes
from tools.harness.node import Node, compile_client

KERNELS = 8  # of driver.c
_HOG = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(-20)
for _ in range(20_000):
    until = time.monotonic() + 0.002
    while time.monotonic() < until:
        pass
    time.sleep(0.001)
"""
MIXED_OPERATIONS = (
    "3*alloc:1048576",
    "alloc_too_much:1099511627776",
    "free",
    *("23*launch:3x5x7:32x1x1", "2*copy_htod_async:1009", "sync") * 4,
    "new:1",
    "7*launch:2x1x1:32x1x1",
    "copy_dtoh:2003",
)
"""Of each kind some, on both devices; see `assert_mixed_operations`"""
Launched = dict[tuple[int, int], tuple[int, int, int]]
"""(device, function) → launches, blocks, threads per block of the latest"""


@dataclass(slots=True)
class Driven:
    """A driver program that is ready, and has not done anything yet."""

    process: ProcessId
    stdin: IO[str]
    stdout: IO[str]
    functions: tuple[int, ...]  # KERNELS for each device
    killed: bool = False

    @classmethod
    def of(cls, tgid: int, stdin: IO[str], stdout: IO[str]) -> Driven:
        """Reads that it is ready."""
        word, *handles = stdout.readline().split() or [""]
        assert word == "ready"
        return cls(Procfs().process_id(tgid), stdin, stdout, tuple(int(handle, 16) for handle in handles))

    def begin(self) -> None:
        """Lets it do its operations."""
        self.stdin.write("go\n")
        self.stdin.flush()

    def finish(self) -> None:
        """Waits until they are done; it lives on."""
        assert self.stdout.readline() == "done\n"

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        os.kill(self.process.tgid, signal.SIGKILL)

    def again(self) -> Driven:
        """Waits until the program that it became is ready."""
        return Driven.of(self.process.tgid, self.stdin, self.stdout)

    def function(self, kernel: int, device: int = 0) -> int:
        """The handle of a kernel."""
        return self.functions[device * KERNELS + kernel]


@dataclass(frozen=True, slots=True)
class Driver:
    """Starts driver programs on a simulated node. `libcuda` is a copy that no other program on the machine uses."""

    program: Path
    node: Node
    libcuda: Path
    cgroup: Path | None = None  # the directory of the one that programs are started in

    @contextmanager
    def start(self, *arguments: str, **variables: str) -> Iterator[Driven]:
        """One program, ready, with these in its environment. It ends with the block."""
        enter = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.cgroup)] if self.cgroup else []
        command = [*enter, str(self.program), *arguments]
        library = {"LD_LIBRARY_PATH": str(self.libcuda.parent)}
        environment = {**os.environ, **self.node.environment, **library, **variables}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                assert process.stdin
                assert process.stdout
                driven = Driven.of(process.pid, process.stdin, process.stdout)
                yield driven
                process.stdin.close()
                assert process.wait(timeout=60) == (-signal.SIGKILL if driven.killed else 0)
            finally:
                process.kill()

    def run(self, *arguments: str, **variables: str) -> Driven:
        """The same to its end."""
        with self.start(*arguments, **variables) as driven:
            driven.begin()
            driven.finish()
        return driven


def compile_driver(folder: Path, name: str = "driver") -> Path:
    """driver.c, or another here, compiled against the simulated libcuda as any program is against the real one."""
    return compile_client(Path(__file__).parent / f"{name}.c", folder / name, "-g", "-O1")


@contextmanager
def a_cpu_that_is_taken_away() -> Iterator[None]:
    """A CPU is busy at the highest priority for two of each three milliseconds."""
    with subprocess.Popen([sys.executable, "-c", _HOG, str(min(os.sched_getaffinity(0)))]) as hog:
        try:
            yield
        finally:
            hog.kill()


def run_together(programs: Sequence[Driven]) -> None:
    """Starts them all, then waits for all."""
    for program in programs:
        program.begin()
    for program in programs:
        program.finish()


def start_all(stack: ExitStack, driver: Driver, count: int, *arguments: str) -> list[Driven]:
    """Several of one kind."""
    return [stack.enter_context(driver.start(*arguments)) for _ in range(count)]


def launched(probes: LibcudaProbes, process: ProcessId, name: str = "launches") -> Launched:
    """What the map `launches` has for a process."""
    return {
        (key.device, key.function): (value.launches, value.blocks, value.threads_per_block)
        for key, value in probes.map(name).items()
        if key.process.id() == process
    }


def kernels(probes: LibcudaProbes, process: ProcessId) -> int:
    """How many kernels ran in all, by the map `launches`."""
    counts = probes.map("launches").items()
    return sum(int(value.kernels) for key, value in counts if key.process.id() == process)


def copied(probes: LibcudaProbes, process: ProcessId) -> dict[tuple[int, str], tuple[int, int]]:
    """(device, direction) → calls, bytes."""
    return {
        (key.device, COPY_DIRECTIONS[key.direction]): (value.calls, value.bytes)
        for key, value in probes.map("copies").items()
        if key.process.id() == process
    }


@dataclass(frozen=True, slots=True)
class Memory:
    """One entry of the map `memory`; `live` has the kinds that are not 0."""

    live: Mapping[str, int]
    allocations: int
    frees: int
    failures: int
    peak: int


def memory(probes: LibcudaProbes, process: ProcessId) -> dict[int, Memory]:
    """By device."""
    found = {}
    for key, value in probes.map("memory").items():
        if key.process.id() == process:
            live = {name: int(bytes_) for name, bytes_ in zip(MEMORY_KINDS, value.live_bytes, strict=True) if bytes_}
            found[key.device] = Memory(live, value.allocations, value.frees, value.failures, value.peak_bytes)
    return found


def latencies(probes: LibcudaProbes, process: ProcessId) -> Any:
    """struct latency of a process, or None."""
    return probes.map("latencies").get(ProcessKey.of(process))


def bounds(found: Any) -> tuple[int, int]:
    """Between which sums the latencies lie, by their buckets."""
    least = most = 0
    for bucket, count in enumerate(found.buckets):
        power, sub = divmod(bucket, 1 << LATENCY_SUB_BITS)
        width = 1 << power + LATENCY_FIRST_POWER - LATENCY_SUB_BITS
        least += count * width * ((1 << LATENCY_SUB_BITS) + sub)
        most += count * width * ((1 << LATENCY_SUB_BITS) + sub + 1)
    return least, most


def lost(probes: LibcudaProbes) -> dict[str, int]:
    """Only what is not 0."""
    return {name: count for name, count in probes.lost() if count}


def assert_mixed_operations(probes: LibcudaProbes, process: ProcessId, functions: tuple[int, int]) -> None:
    """Asserts that the maps show exactly MIXED_OPERATIONS. `functions`: the first kernel's handle on device 0 and 1."""
    mib = 1 << 20
    assert launched(probes, process) == {
        (0, functions[0]): (4 * 23, 4 * 23 * 105, 32),
        (1, functions[1]): (7, 14, 32),
    }
    assert memory(probes, process) == {0: Memory({"plain": 2 * mib}, 3, 1, failures=1, peak=3 * mib)}
    assert copied(probes, process) == {
        (0, "host_to_device"): (8, 8 * 1009),
        (1, "device_to_host"): (1, 2003),
    }
    assert latencies(probes, process).count == 4 + 1


def resume_until_done(driven: Driven) -> None:
    """Undoes each of its stops: there is no guardian."""
    while not select.select([driven.stdout], [], [], 0)[0]:
        if Procfs().stat(driven.process.tgid).state == "T":
            os.kill(driven.process.tgid, signal.SIGCONT)
    driven.finish()


def records(probes: LibcudaProbes) -> list[Wake]:
    """What waits in the ring for the guardian."""
    found: list[Wake] = []
    ring = RingBuffer(
        probes.bpf.lib, probes.bpf.map_fd("pauses"), lambda data: found.append(Wake.from_buffer_copy(data))
    )
    ring.consume()
    ring.close()
    return found
