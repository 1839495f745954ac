# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes: one loaded BPF object, attached to every copy of libcuda that was shown to it.

Each file is attached once, whatever the paths that lead to it. What could not be attached is remembered with its
reason, for the status that people see. Files are attached by the observing thread; the watcher's takes the probes off
those that somebody writes over.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent import layout
from agent.containers.index import ContainerIndex
from agent.elf import exported_functions
from agent.errors import ProbeError
from agent.libbpf import BpfObject, Link, Map
from agent.libraries import FileId, opened
from agent.library_changes import LibraryChanges
from agent.model import HOST, ContainerKey, ProbeCounts, ProbeStatus, ProcessId
from agent.procfs import Procfs
from agent.proctext import MappedFile
from agent.returns import returns
from agent.symbols import DENYING, PROGRAMS, SYMBOLS, Role, Symbol, unknown_versions

_log = logging.getLogger(__name__)
_MOST_LIBRARIES = 1023  # that are probed
_MOST_OF_ONE_CONTAINER = 32  # of these, brought by it: its copies must not leave the others' without a place
_MOST_UNREADABLE = 256  # files that could not be probed and are remembered, so that they are read once
_MOST_OWNERS = 256
_MOST_NUMBERS = 4096  # of files that were seen
_LIBRARY_NUMBERS = 1 << 16  # what the cookie has room for


@dataclass(slots=True)
class AttachedLibrary:
    """One file: which symbols are attached, which it does not have, and why others failed."""

    number: int
    path: str
    attached: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unknown_versions: list[str] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    version: tuple[int, int] = (0, 0)  # size and time of the last change
    inode: int = 0
    watch: int | None = None
    owner: ContainerKey | None = None  # who showed it first; None: the agent, for the node's own

    @property
    def unreadable(self) -> bool:
        """There is nothing to attach: it is no library, or none that may be read."""
        return "*" in self.failed

    def status(self) -> ProbeStatus:
        """What is exported."""
        return ProbeStatus(
            self.path,
            len(self.attached),
            len(self.absent),
            len(self.failed),
            self._roles(),
            dict(self.failed),
            tuple(self.unknown_versions),
        )

    def _roles(self) -> dict[str, ProbeCounts]:
        attached, absent = set(self.attached), set(self.absent)
        counts = {}
        for role in Role:
            names = {symbol.name for symbol in SYMBOLS if symbol.role is role}
            counts[role.value] = ProbeCounts(
                len(names & attached), len(names & absent), len(names & self.failed.keys())
            )
        return counts


class Probes:
    """Loads the object and attaches it. A context manager; leaving it takes every probe away."""

    def __init__(self, object_path: Path, proc: Procfs) -> None:
        self._proc = proc
        _allow_many_files()
        self.can_deny = _can_deny(object_path.with_name("deny.bpf.o"))
        self.bpf = _load(object_path, self.can_deny)
        layout.check(self.bpf)
        self._sm_count = 0
        self._maps: dict[str, Map] = {}
        self._libraries: dict[FileId, AttachedLibrary] = {}
        self._owners = ContainerIndex(proc, _MOST_OWNERS)
        self.bpf.attach("process_exit")
        self.bpf.attach("process_exec")
        self._numbers = itertools.count(1)
        self._number: dict[FileId, int] = {}  # a file keeps its own: by it the kernel side knows whose call is whose
        self.dropped = 0  # libraries whose probes went because they are being written over
        self.refused = 0  # looks at libraries for which there was no place
        self._changing = threading.RLock()
        self.changes = LibraryChanges()

    def map(self, name: str) -> Map:
        """The map `name` with the types of agent/layout.py."""
        if name not in self._maps:
            self._maps[name] = self.bpf.map(name, *layout.MAPS[name])
        return self._maps[name]

    def ensure(self, path: str, process: ProcessId | None = None) -> AttachedLibrary:
        """Attaches the file at `path` (as the process sees it) unless it is. GoneError when there is no such file.

        Without a process: the node's own, for which there is always a place.
        """
        with opened(self._proc, process or self._proc.process_id(os.getpid()), path) as (descriptor, facts, file):
            return self._ensure(path, descriptor, file, facts, process)

    def ensure_mapped(self, file: MappedFile, process: ProcessId) -> AttachedLibrary:
        """The same for a file that the process has mapped and that was deleted or replaced since."""
        descriptor = self._proc.open_mapped(process, file)
        try:
            facts = os.fstat(descriptor)
            return self._ensure(file.path, descriptor, FileId(facts.st_dev, facts.st_ino), facts, process)
        finally:
            os.close(descriptor)

    def _ensure(
        self, path: str, descriptor: int, file: FileId, facts: os.stat_result, process: ProcessId | None
    ) -> AttachedLibrary:
        version = (facts.st_size, facts.st_mtime_ns)
        with self._changing:
            known = self._libraries.get(file)
            if known is not None and known.version != version:  # written over: other functions at these offsets
                _log.warning("%s was replaced in place: attaching anew", path)
                self.drop(known)
                known = None
            if known is None:
                owner = self._owners.container_of(process).key if process else None
                if full := self._full(owner):
                    if not self.refused:
                        _log.warning("%s is not probed: %s; the like is only counted from now on", path, full)
                    self.refused += 1
                    return AttachedLibrary(0, path, failed={"*": full})
                watch = self.changes.watch(descriptor, path)  # first, so that no change after the look is missed
                known = self._libraries[file] = self._attach(path, descriptor, file)
                known.version, known.inode, known.watch, known.owner = version, file.inode, watch, owner
                self._forget_unreadable()
            return known

    def _full(self, owner: ContainerKey | None) -> str | None:
        """Why there is no place for another of this container."""
        owners = [library.owner for library in self._libraries.values() if not library.unreadable]
        if owner is not None and len(owners) >= _MOST_LIBRARIES:
            return f"more than {_MOST_LIBRARIES} copies of libcuda on one node"
        if owner not in (None, HOST) and owners.count(owner) >= _MOST_OF_ONE_CONTAINER:
            return f"more than {_MOST_OF_ONE_CONTAINER} copies of libcuda in {owner}"
        return None

    def _forget_unreadable(self) -> None:
        """Those that were seen first, when there are many."""
        unreadable = [library for library in self._libraries.values() if library.unreadable]
        for library in unreadable[: max(0, len(unreadable) - _MOST_UNREADABLE)]:
            self.drop(library)

    def drop(self, library: AttachedLibrary) -> None:
        """Takes the probes of a file away that is gone and that nobody maps any more."""
        with self._changing:
            links, library.links = library.links, []  # whoever comes second finds none
            if library.watch is not None:
                self.changes.forget(library.watch)
                library.watch = None
            self.bpf.detach_all(links)
            for symbol in () if library.unreadable else SYMBOLS:
                if symbol.role is Role.ALLOC:
                    self.map("returns").delete(layout.U64(symbol.cookie(library.number)))
            self._libraries = {file: known for file, known in self._libraries.items() if known is not library}

    def drop_changed(self) -> None:
        """Takes the probes off files that somebody began to write over; what they become is for `ensure`."""
        with self._changing:
            changed = self.changes.take()
            for library in [library for library in self._libraries.values() if library.watch in changed]:
                _log.warning("%s is written over in place: its probes go until that is done", library.path)
                self.drop(library)
                self.dropped += 1

    def _number_of(self, file: FileId) -> int:
        if file not in self._number:
            self._number[file] = next(self._numbers) % _LIBRARY_NUMBERS
        while len(self._number) > _MOST_NUMBERS:
            del self._number[next(iter(self._number))]
        return self._number[file]

    def _attach(self, path: str, descriptor: int, file: FileId) -> AttachedLibrary:
        library = AttachedLibrary(0, path)
        try:
            offsets = exported_functions(descriptor, "cu")
        except ProbeError as error:
            library.failed["*"] = str(error)
            _log.warning("%s: %s", path, error)
            return library
        library.number = self._number_of(file)
        library.unknown_versions = unknown_versions(offsets.keys())
        wanted: dict[int, Symbol] = {}  # two names of one function are one probe
        for symbol in SYMBOLS:
            offset = offsets.get(symbol.name)
            if offset is None:
                library.absent.append(symbol.name)
            else:
                wanted.setdefault(offset, symbol)
        if self.can_deny:
            self._tell_returns(library, descriptor, wanted)
        self._attach_all(library, f"/proc/self/fd/{descriptor}", wanted)  # that very file, whatever the path is by now
        _log.info("attached %d symbols of %s", len(library.attached), path)
        return library

    def _tell_returns(self, library: AttachedLibrary, descriptor: int, wanted: Mapping[int, Symbol]) -> None:
        """Where a denied allocation goes on. One that is not told is held instead."""
        allocations = {offset: symbol for offset, symbol in wanted.items() if symbol.role is Role.ALLOC}
        try:
            found = returns(descriptor, allocations, wanted)
        except (ProbeError, OSError) as error:  # it was cut or written over since its functions were found
            _log.warning("%s: %s", library.path, error)
            return
        for offset, distance in found.items():
            cookie = allocations[offset].cookie(library.number)
            self.map("returns").put(layout.U64(cookie), layout.S64(distance))

    def _attach_all(self, library: AttachedLibrary, path: str, wanted: Mapping[int, Symbol]) -> None:
        """Returns first: an entry whose return is not watched would be waited for."""
        for at_return in (True, False):
            for program, symbols in _by_program(wanted, at_return, self.can_deny).items():
                self._attach_program(library, path, program, symbols, at_return=at_return)
        library.attached = [symbol.name for symbol in wanted.values() if symbol.name not in library.failed]

    def _attach_program(
        self, library: AttachedLibrary, path: str, program: str, symbols: Mapping[int, Symbol], *, at_return: bool
    ) -> None:
        """All at once; where that is refused, one by one, to learn which it is."""
        probes = [(offset, symbol.cookie(library.number)) for offset, symbol in symbols.items()]
        try:
            library.links += self.bpf.attach_uprobes(program, path, probes, at_return=at_return)
            return
        except ProbeError as error:
            _log.debug("%s: one by one then", error)
        for (offset, cookie), symbol in zip(probes, symbols.values(), strict=True):
            try:
                library.links += self.bpf.attach_uprobes(program, path, [(offset, cookie)], at_return=at_return)
            except ProbeError as error:
                library.failed[symbol.name] = str(error)
                _log.warning("%s of %s: %s", symbol.name, library.path, error)

    def libraries(self) -> tuple[AttachedLibrary, ...]:
        """All files that are remembered: those that are probed, and the last that could not be."""
        return tuple(self._libraries.values())

    def lost(self) -> Iterator[tuple[str, int]]:
        """What the kernel side had to drop since start, by reason."""
        counts = self.map("lost")
        for index, name in enumerate(layout.LOST):
            yield name, sum(counts.per_cpu(layout.U32(index)))

    def calls(self) -> dict[str, int]:
        """Calls that were seen of each symbol since start, of those that were called at all."""
        counts = self.map("hits").per_cpu_array(len(SYMBOLS))
        return {symbol.name: count for symbol, count in zip(SYMBOLS, counts, strict=True) if count}

    def tell_sm_count(self, count: int) -> None:
        """How many SMs every device has, so that waves of blocks can be counted; 0: they differ, or it is not known."""
        if count != self._sm_count:
            self.map("sm_counts").put(layout.U32(0), layout.U32(count))
            self._sm_count = count

    def close(self) -> None:
        """Detaches everything."""
        self.changes.close()
        self.bpf.close()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _allow_many_files() -> None:
    """A single uprobe is two descriptors, so before Linux 6.6 two libraries are more than the usual 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _can_deny(path: Path) -> bool:
    """Whether this kernel lets a uprobe change registers (Linux ≥ 6.18): what can do so is loaded, and dropped."""
    if not path.is_file():  # no reason to see nothing
        _log.info("allocations are held here, not denied: %s is missing; run `make bpf`, or reinstall", path)
        return False
    try:
        with BpfObject(path):
            return True
    except ProbeError as error:
        _log.info("allocations are held here, not denied: the kernel does not let probes change registers: %s", error)
        return False


def _load(path: Path, can_deny: bool) -> BpfObject:
    """For uprobe_multi where the kernel has it (Linux ≥ 6.6), else for single uprobes."""
    also = {DENYING} if can_deny else set[str]()
    programs = {program for pair in PROGRAMS.values() for program in pair if program} | also
    try:
        return BpfObject(path, multi=programs, also=also)
    except ProbeError as error:
        _log.info("no uprobe_multi here, so probes are taken away more slowly: %s", error)
        return BpfObject(path, also=also)


def _by_program(wanted: Mapping[int, Symbol], at_return: bool, can_deny: bool) -> dict[str, dict[int, Symbol]]:
    groups: dict[str, dict[int, Symbol]] = {}
    for offset, symbol in wanted.items():
        program = PROGRAMS[symbol.role][1 if at_return else 0]
        if can_deny and symbol.role is Role.ALLOC and not at_return:
            program = DENYING
        if program is not None:
            groups.setdefault(program, {})[offset] = symbol
    return groups
