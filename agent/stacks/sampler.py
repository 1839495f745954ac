# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The container that `gpuwarden stacks --container` names, and the probes on the copies of libcuda that it maps.

Invariant: the kernel records nothing of other containers: a process is sampled only while it is in the map `wanted`.
The structures are those of bpf/stacks.h.
"""

from __future__ import annotations

import ctypes as c
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Self

from agent.containers.index import ContainerIndex
from agent.core.errors import GoneError, ProbeError, SetupError, WardenError
from agent.core.model import Container, ContainerKey, ProcessId
from agent.node.elf import exported_extents
from agent.node.instructions import places
from agent.node.procfs import Procfs
from agent.probes.attachment import Attachments, ProbedFunction
from agent.probes.libbpf import load_uprobes
from agent.probes.libraries import opened
from agent.probes.symbols import SYMBOLS, SymbolRole, by_offset, is_on_device

STACK_FRAMES = 127
TALLIES = ("seen", "sampled", "collision", "no_stack", "full", "unreadable")
LOSSES = TALLIES[2:]
U32, U64 = c.c_uint32, c.c_uint64
Addresses = c.c_uint64 * STACK_FRAMES


class StackKey(c.Structure):
    """Process, stack number and return address of a probed call."""

    _fields_ = [("tgid", U32), ("stack", c.c_int32), ("caller", U64)]


class Count(c.Structure):
    """Number of launches."""

    _fields_ = [("value", U64)]


class LiveKey(c.Structure):
    """An allocation: pointer and process."""

    _fields_ = [("pointer", U64), ("tgid", U32), ("_pad", U32)]


class Live(c.Structure):
    """The stack and the size of an allocation."""

    _fields_ = [("stack", StackKey), ("bytes", U64)]


Stack = tuple[int, int, int]  # tgid, number of the stack, return address of the probed call


class SampleKind(StrEnum):
    """What is sampled."""

    LAUNCH = "launch"
    ALLOC = "alloc"


_PROGRAMS: dict[SampleKind, dict[SymbolRole, tuple[str, str | None]]] = {  # entry, return
    SampleKind.LAUNCH: {SymbolRole.LAUNCH: ("stacks_launch", None)},
    SampleKind.ALLOC: {
        SymbolRole.ALLOC: ("stacks_alloc_enter", "stacks_alloc_return"),
        SymbolRole.FREE: ("stacks_free_enter", "stacks_free_return"),
    },
}


class Sampler:
    """A context manager: leaving it detaches the probes."""

    def __init__(self, object_path: Path, proc: Procfs, kind: SampleKind) -> None:
        self._proc, self._programs = proc, _PROGRAMS[kind]
        names = {program for pair in self._programs.values() for program in pair if program}
        self.bpf = load_uprobes(object_path, names)
        self._files = Attachments(self.bpf, lambda _: None)
        self._libraries = itertools.count(1)
        self._wanted: set[ProcessId] = set()
        self._wanted_map = self.bpf.map("wanted", U32, U32)
        self._counts = self.bpf.map("counts", StackKey, Count)
        self._live = self.bpf.map("live", LiveKey, Live)
        self._stacks = self.bpf.map("stacks", U32, Addresses)
        self._tallies = self.bpf.map("tallies", U32, U64)
        self._every = self.bpf.map("every", U32, U32)

    def follow(self, processes: Iterable[tuple[ProcessId, tuple[str, ...]]]) -> None:
        """Exactly these are sampled from now on."""
        self._files.drop_changed(self._files.changes.take())
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
        """The processes that are sampled."""
        return {process.tgid for process in self._wanted}

    def draw_every(self, count: int) -> None:
        """Records one launch in `count` on average, drawn at random; each then counts `count` times."""
        self._every.put(U32(0), U32(count))

    def launches(self) -> dict[Stack, int]:
        """Estimated launches by stack."""
        return {_stack(key): value.value for key, value in self._counts.items()}

    def live_bytes(self) -> dict[Stack, int]:
        """Bytes by stack, of allocations since the start that are not freed and whose process still runs."""
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
        """Calls seen, samples recorded, samples lost by cause."""
        return dict(zip(TALLIES, self._tallies.per_cpu_array(len(TALLIES)), strict=True))

    def _ensure(self, process: ProcessId, path: str) -> None:
        with suppress(GoneError), opened(self._proc, process, path) as file:
            if self._files.find(file) is None:
                attachment = self._files.attach(file, self._functions)
                for reason in attachment.failed.values():
                    raise ProbeError(reason)

    def _functions(self, descriptor: int) -> list[ProbedFunction]:
        library = next(self._libraries)
        symbols = [symbol for symbol in SYMBOLS if symbol.role in self._programs and is_on_device(symbol)]
        extents = exported_extents(descriptor, "cu")
        found = places(descriptor, extents.values())
        return [
            ProbedFunction(symbol.name, offset, symbol.cookie(library), *self._programs[symbol.role], found[offset])
            for offset, symbol in by_offset(symbols, extents).items()
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self.bpf.close()


def with_caller(addresses: list[int], caller: int) -> list[int]:
    """Inserts the caller, where the kernel leaves it out: a function has no frame yet where its probe stands.

    Linux ≥ 6.12 leaves it in where the probe is on `push %rbp` or endbr64.
    """
    if not caller or caller in addresses[1:2]:
        return addresses
    return [*addresses[:1], caller, *addresses[1:]]


def _stack(key: StackKey) -> Stack:
    return key.tgid, key.stack, key.caller


_LIBCUDA = re.compile(r"libcuda\.so(\.[0-9.]+)?")
_SHORTEST_ID = 4
_MOST_LISTED = 20


def choose(wanted: str, candidates: Iterable[Container]) -> Container:
    """The one container that `wanted` names: its key, name, pod or unit, or the beginning of its id.

    WardenError that lists the candidates when there is none, or more than one.
    """
    known = sorted(candidates, key=lambda container: container.name)
    for matches in (_exact, _id_prefix):
        found = [container for container in known if matches(container, wanted)]
        if len(found) == 1:
            return found[0]
        if found:
            raise WardenError(f"{wanted} names more than one container, give the key of one: {_listed(found)}")
    if not known:
        raise WardenError(f"no container called {wanted}: no process on this node has libcuda mapped")
    raise WardenError(f"no container that uses a GPU is called {wanted}; those that do: {_listed(known)}")


def _exact(container: Container, wanted: str) -> bool:
    last = container.cgroup.rstrip("/").rpartition("/")[2]
    return wanted in (container.key, container.name, container.id, container.pod, container.cgroup, last)


def _id_prefix(container: Container, wanted: str) -> bool:
    return len(wanted) >= _SHORTEST_ID and bool(container.id) and container.id.startswith(wanted)


def _listed(containers: list[Container]) -> str:
    shown = ", ".join(f"{container.name} ({container.key})" for container in containers[:_MOST_LISTED])
    more = len(containers) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


class SampledContainer:
    """Finds the container, then at each round its processes; only processes that map libcuda count.

    `named`: containers with the names that a running agent knows; a cgroup contains no more than their ids.
    """

    def __init__(self, proc: Procfs, named: Iterable[Container] = ()) -> None:
        self.proc, self._index = proc, ContainerIndex(proc)
        self._named = {container.key: container for container in named}
        self._others: set[ProcessId] = set()

    def find(self, wanted: str) -> Container:
        """The container that `wanted` names."""
        return choose(wanted, self._by_key().values())

    def processes(self, key: ContainerKey) -> Iterator[tuple[ProcessId, tuple[str, ...]]]:
        """The container's current processes, each with the paths of its libcuda as it sees them."""
        alive = set()
        for process in self._all():
            alive.add(process)
            if process in self._others:
                continue
            try:
                if self._index.container_of(process).key != key:
                    self._others.add(process)
                elif paths := self._libcuda(process):
                    yield process, paths
            except GoneError:
                continue
        self._others &= alive

    def _by_key(self) -> dict[ContainerKey, Container]:
        found = {}
        for process in self._all():
            try:
                if self._libcuda(process):
                    container = self._index.container_of(process)
                    found[container.key] = self._named.get(container.key, container)
            except (GoneError, SetupError):
                continue
        return found

    def _all(self) -> Iterator[ProcessId]:
        for tgid in self.proc.tgids():
            try:
                yield self.proc.process_id(tgid)
            except GoneError:
                continue

    def _libcuda(self, process: ProcessId) -> tuple[str, ...]:
        mapped = self.proc.mapped(process.tgid, lambda name: _LIBCUDA.fullmatch(name) is not None)
        return tuple(file.path for file in mapped if not file.deleted)
