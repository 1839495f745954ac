# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes of `gpuwarden stacks`: attached to what one container maps, gone when the block is left.

Invariant: the kernel records nothing of any other container: a process counts only once it is in the map `wanted`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Self

from agent.elf import exported_functions
from agent.errors import GoneError, ProbeError
from agent.libbpf import BpfObject
from agent.libraries import FileId, opened
from agent.model import ProcessId
from agent.procfs import Procfs
from agent.stacks.layout import TALLIES, U32, U64, Addresses, Count, Live, LiveKey, StackKey
from agent.symbols import SYMBOLS, Role, Symbol, is_on_device

Stack = tuple[int, int, int]
"""tgid, number of the stack, return address of the probed call"""


class Kind(StrEnum):
    """What is sampled."""

    LAUNCH = "launch"
    ALLOC = "alloc"


_PROGRAMS: dict[Kind, dict[Role, tuple[str, str | None]]] = {  # entry, return
    Kind.LAUNCH: {Role.LAUNCH: ("stacks_launch", None)},
    Kind.ALLOC: {
        Role.ALLOC: ("stacks_alloc_enter", "stacks_alloc_return"),
        Role.FREE: ("stacks_free_enter", "stacks_free_return"),
    },
}


class Sampler:
    """A context manager: leaving it takes the probes away."""

    def __init__(self, object_path: Path, proc: Procfs, kind: Kind) -> None:
        self._proc, self._programs = proc, _PROGRAMS[kind]
        names = {program for pair in self._programs.values() for program in pair if program}
        try:
            self.bpf = BpfObject(object_path, multi=names)
        except ProbeError:  # before Linux 6.6: single probes
            self.bpf = BpfObject(object_path)
        self._files: dict[FileId, int] = {}
        self._wanted: set[ProcessId] = set()
        self._wanted_map = self.bpf.map("wanted", U32, U32)
        self._counts = self.bpf.map("counts", StackKey, Count)
        self._live = self.bpf.map("live", LiveKey, Live)
        self._stacks = self.bpf.map("stacks", U32, Addresses)
        self._tallies = self.bpf.map("tallies", U32, U64)
        self._every = self.bpf.map("every", U32, U32)

    def follow(self, processes: Iterable[tuple[ProcessId, tuple[str, ...]]]) -> None:
        """Exactly these are sampled from now on."""
        now = set()
        for process, paths in processes:
            now.add(process)
            if process in self._wanted:
                continue
            for path in paths:
                self._ensure(process, path)
            try:
                self._wanted_map.put(U32(process.tgid), U32(1))
            except OSError as error:
                raise ProbeError("the container has more GPU processes than stacks can follow: 4096") from error
        tgids = {process.tgid for process in now}
        for process in self._wanted - now:
            if process.tgid not in tgids:
                self._wanted_map.delete(U32(process.tgid))
        self._wanted = now

    def tgids(self) -> set[int]:
        """Who is sampled."""
        return {process.tgid for process in self._wanted}

    def draw_every(self, count: int) -> None:
        """On average every how many launches one is recorded; each then counts for so many."""
        self._every.put(U32(0), U32(count))

    def launches(self) -> dict[Stack, int]:
        """Estimated launches by stack."""
        return {_stack(key): value.value for key, value in self._counts.items()}

    def live_bytes(self) -> dict[Stack, int]:
        """Bytes by stack, of what was allocated meanwhile, is not freed, and whose process still runs."""
        alive = {process.tgid for process in self._wanted if self._proc.is_alive(process)}
        found: Counter[Stack] = Counter()
        for key, value in self._live.items():
            if key.tgid in alive:
                found[_stack(value.stack)] += value.bytes
        return dict(found)

    def addresses(self, stack: Stack) -> list[int]:
        """Innermost first; the first is the probed function itself."""
        found = self._stacks.get(U32(stack[1]))
        return with_caller([address for address in found or () if address], stack[2])

    def tallies(self) -> dict[str, int]:
        """What was seen, recorded and lost."""
        return {name: sum(self._tallies.per_cpu(U32(index))) for index, name in enumerate(TALLIES)}

    def _ensure(self, process: ProcessId, path: str) -> None:
        with suppress(GoneError), opened(self._proc, process, path) as (descriptor, _, file):
            if file not in self._files:
                self._files[file] = len(self._files) + 1
                self._attach(descriptor, self._files[file])

    def _attach(self, descriptor: int, library: int) -> None:
        """Returns first: an entry whose return is not watched would be waited for."""
        symbols = [symbol for symbol in SYMBOLS if symbol.role in self._programs and is_on_device(symbol)]
        offsets = exported_functions(descriptor, "cu")
        at = {offsets[symbol.name]: symbol for symbol in reversed(symbols) if offsets.get(symbol.name) is not None}
        for at_return in (True, False):
            for role, pair in self._programs.items():
                program = pair[1 if at_return else 0]
                probes = list(_probes(at, role, library))
                if program and probes:
                    self.bpf.attach_uprobes(program, f"/proc/self/fd/{descriptor}", probes, at_return=at_return)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bpf.close()


def with_caller(addresses: list[int], caller: int) -> list[int]:
    """The frame that kernels before 6.12 leave out: at its first instruction a function has no frame of its own yet."""
    if not caller or caller in addresses[1:2]:
        return addresses
    return [*addresses[:1], caller, *addresses[1:]]


def _probes(symbols: dict[int, Symbol], role: Role, library: int) -> Iterator[tuple[int, int]]:
    return ((offset, symbol.cookie(library)) for offset, symbol in symbols.items() if symbol.role is role)


def _stack(key: StackKey) -> Stack:
    return key.tgid, key.stack, key.caller
