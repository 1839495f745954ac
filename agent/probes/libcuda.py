# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes on libcuda: one loaded BPF object, attached to every copy of the library that was found.

Each file is attached once, whatever the paths that lead to it. What could not be attached is remembered with its
reason, for the exported status. The observer's thread attaches; the event reader's thread detaches from files that are
being written over.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.containers.index import ContainerIndex
from agent.core.errors import ProbeError
from agent.core.model import HOST, ContainerKey, ProbeCounts, ProbeStatus, ProcessId
from agent.node.elf import exported_extents
from agent.node.instructions import ProbePlace, places, returns
from agent.node.proc_parse import MappedFile
from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.attachment import Attachment, Attachments, ProbedFunction
from agent.probes.libbpf import BpfObject, Map, load_uprobes
from agent.probes.libraries import FileId, OpenFile, opened
from agent.probes.return_probes import LOST
from agent.probes.symbols import (
    DENYING,
    PROGRAMS,
    SYMBOLS,
    WITHOUT_RETURNS,
    Role,
    Symbol,
    by_offset,
    unknown_versions,
)

_log = logging.getLogger(__name__)
_MOST_LIBRARIES = 1023  # that are probed
_MOST_OF_ONE_CONTAINER = 32  # of these, brought by it: its copies must not leave none for others
_MOST_UNREADABLE = 256  # files that could not be probed and are remembered, so that they are read once
_MOST_OWNERS = 256
_MOST_NUMBERS = 4096  # of files that were seen
_LIBRARY_NUMBERS = 1 << 16  # what the cookie has room for


@dataclass(slots=True)
class AttachedLibrary:
    """One file: which symbols are attached, which it does not have, why others failed, and which need return probes
    where there are none (`off`)."""

    number: int
    path: str
    attached: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    unknown_versions: list[str] = field(default_factory=list)
    places: dict[str, ProbePlace] = field(default_factory=dict)  # of the probes of each symbol that it has
    attachment: Attachment | None = None  # None: not remembered, as there are too many
    owner: ContainerKey | None = None  # the container that brought it first; None: the node itself

    @property
    def inode(self) -> int:
        """Of the file; 0 where nothing is attached."""
        return self.attachment.file.inode if self.attachment else 0

    @property
    def unreadable(self) -> bool:
        """Whether there is nothing to attach: it is no library, or cannot be read."""
        return "*" in self.failed

    def status(self) -> ProbeStatus:
        """What is exported of it."""
        return ProbeStatus(
            self.path,
            len(self.attached),
            len(self.absent),
            len(self.failed),
            self._roles(),
            dict(self.failed),
            tuple(self.unknown_versions),
            len(self.off),
        )

    def _roles(self) -> dict[str, ProbeCounts]:
        attached, absent, off = set(self.attached), set(self.absent), set(self.off)
        counts = {}
        for role in Role:
            names = {symbol.name for symbol in SYMBOLS if symbol.role is role}
            counts[role.value] = ProbeCounts(
                len(names & attached), len(names & absent), len(names & self.failed.keys()), len(names & off)
            )
        return counts


class _FileNumbers:
    """A number for each file, kept while it is among the last seen: by it the kernel side knows whose call is whose."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._numbers: dict[FileId, int] = {}

    def of(self, file: FileId) -> int:
        """The number of a file."""
        if file not in self._numbers:
            self._numbers[file] = next(self._next) % _LIBRARY_NUMBERS
        while len(self._numbers) > _MOST_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return self._numbers[file]


class LibcudaProbes:
    """Loads the object and attaches it. A context manager; leaving it detaches every probe.

    `returns_off`: why no return probes are attached, nor anything that is wrong without them; None: they are.
    """

    def __init__(self, object_path: Path, proc: Procfs, returns_off: str | None = None) -> None:
        self._proc, self.returns_off = proc, returns_off
        _allow_many_files()
        self.can_deny = returns_off is None and _can_deny(object_path.with_name("deny.bpf.o"))
        self.bpf = _load(object_path, self.can_deny)
        abi.check(self.bpf)
        if returns_off is not None:
            _log.warning("return probes are off (%s): %s", returns_off, LOST)
        self._maps: dict[str, Map] = {}
        self._owners = ContainerIndex(proc, _MOST_OWNERS)
        self.bpf.attach("process_exit")
        self.bpf.attach("process_exec")
        self._numbers = _FileNumbers()
        self.dropped = 0  # libraries that lost their probes because they are being written over
        self.refused = 0  # libraries that were not probed because there were too many
        self._lock = threading.RLock()  # over both below
        self._libraries: dict[Attachment, AttachedLibrary] = {}
        self._files = Attachments(self.bpf, self._forget)

    def map(self, name: str) -> Map:
        """The map `name` with the types of agent/probes/abi.py."""
        if name not in self._maps:
            self._maps[name] = self.bpf.map(name, *abi.MAPS[name])
        return self._maps[name]

    def ensure(self, path: str, process: ProcessId | None = None) -> AttachedLibrary:
        """Attaches the file at `path` (as the process sees it) unless it is. GoneError when there is no such file.

        Without a process: the node's own, for which no limit holds.
        """
        with opened(self._proc, process or self._proc.process_id(os.getpid()), path) as file:
            return self._ensure(file, process)

    def ensure_mapped(self, file: MappedFile, process: ProcessId) -> AttachedLibrary:
        """The same for a file that the process has mapped and that was deleted or replaced since."""
        descriptor = self._proc.open_mapped(process, file)
        try:
            return self._ensure(OpenFile.of(descriptor, file.path), process)
        finally:
            os.close(descriptor)

    def _ensure(self, file: OpenFile, process: ProcessId | None) -> AttachedLibrary:
        with self._lock:
            attachment = self._files.find(file)
            if attachment is not None:
                return self._libraries[attachment]
            owner = self._owners.container_of(process).key if process else None
            if full := self._full(owner):
                if not self.refused:
                    _log.warning("%s is not probed: %s; further ones are only counted", file.path, full)
                self.refused += 1
                return AttachedLibrary(0, file.path, failed={"*": full})
            library = self._attach(file, owner)
            self._forget_unreadable()
            return library

    def _full(self, owner: ContainerKey | None) -> str | None:
        """Why no further library of this container is probed."""
        owners = [library.owner for library in self._libraries.values() if not library.unreadable]
        if owner is not None and len(owners) >= _MOST_LIBRARIES:
            return f"more than {_MOST_LIBRARIES} copies of libcuda on one node"
        if owner not in (None, HOST) and owners.count(owner) >= _MOST_OF_ONE_CONTAINER:
            return f"more than {_MOST_OF_ONE_CONTAINER} copies of libcuda in {owner}"
        return None

    def _forget_unreadable(self) -> None:
        """Drops those that were seen first, when there are many."""
        unreadable = [library for library in self._libraries.values() if library.unreadable]
        for library in unreadable[: max(0, len(unreadable) - _MOST_UNREADABLE)]:
            self.drop(library)

    def drop(self, library: AttachedLibrary) -> None:
        """Detaches the probes of a file that no process maps any more."""
        with self._lock:
            if library.attachment is not None:
                self._files.drop(library.attachment)

    def changes_fd(self) -> int | None:
        """Readable when `drop_changed` has something to do; None where the kernel does not report writes."""
        return self._files.changes.fileno()

    def drop_changed(self) -> None:
        """Detaches from files that are being written over; `ensure` attaches to what they become."""
        watches = self._files.changes.take()  # without the lock: it is held while a library is attached
        if watches:
            with self._lock:
                self.dropped += len(self._files.drop_changed(watches))

    def _forget(self, attachment: Attachment) -> None:
        library = self._libraries.pop(attachment, None)
        for symbol in () if library is None or library.unreadable else SYMBOLS:
            if library is not None and symbol.role is Role.ALLOC:
                self.map("returns").delete(abi.U64(symbol.cookie(library.number)))

    def _attach(self, file: OpenFile, owner: ContainerKey | None) -> AttachedLibrary:
        library = AttachedLibrary(0, file.path, owner=owner)
        probed: list[ProbedFunction] = []

        def functions(descriptor: int) -> list[ProbedFunction]:
            probed.extend(self._functions(library, file.file, descriptor))
            return probed

        library.attachment = self._files.attach(file, functions)
        self._libraries[library.attachment] = library
        library.failed.update(library.attachment.failed)
        library.attached = [function.name for function in probed if function.name not in library.failed]
        if not library.unreadable:
            _log.info("attached %d symbols of %s", len(library.attached), file.path)
        return library

    def _functions(self, library: AttachedLibrary, file: FileId, descriptor: int) -> list[ProbedFunction]:
        """What is probed in a file; none where it is no library that can be read, with the reason in `failed`."""
        try:
            extents = exported_extents(descriptor, "cu")
            probe_places = places(descriptor, extents.values())
        except (ProbeError, OSError) as error:
            library.failed["*"] = str(error)
            _log.warning("%s: %s", library.path, error)
            return []
        library.number = self._numbers.of(file)
        library.unknown_versions = unknown_versions(extents.keys())
        library.absent = [symbol.name for symbol in SYMBOLS if symbol.name not in extents]
        probed = self._probed()
        library.off = [one.name for one in SYMBOLS if one.name in extents and one not in probed]
        functions = [
            _function(offset, symbol, library.number, probe_places[offset])
            for offset, symbol in by_offset(probed, extents).items()
        ]
        library.places = {function.name: function.place for function in functions}
        return self._denying(library, descriptor, functions) if self.can_deny else functions

    def _probed(self) -> tuple[Symbol, ...]:
        if self.returns_off is None:
            return SYMBOLS
        return tuple(symbol for symbol in SYMBOLS if symbol.role in WITHOUT_RETURNS)

    def _denying(
        self, library: AttachedLibrary, descriptor: int, functions: Sequence[ProbedFunction]
    ) -> list[ProbedFunction]:
        """With allocations denied that do not fit, and where a denied one goes on; one without that is held instead."""
        allocating, _ = PROGRAMS[Role.ALLOC]
        functions = [replace(one, entry=DENYING) if one.entry == allocating else one for one in functions]
        denying = {one.probe_offset: one for one in functions if one.entry == DENYING}
        try:
            found = returns(descriptor, denying, [one.probe_offset for one in functions])
        except (ProbeError, OSError) as error:  # it was cut or written over since its functions were found
            _log.warning("%s: %s", library.path, error)
            found = {}
        for offset, distance in found.items():
            self.map("returns").put(abi.U64(denying[offset].cookie), abi.S64(distance))
        return functions

    def libraries(self) -> tuple[AttachedLibrary, ...]:
        """All files that are remembered: those that are probed, and the last that could not be."""
        return tuple(self._libraries.values())

    def lost(self) -> Iterator[tuple[str, int]]:
        """What the kernel side dropped since the start, by reason."""
        counts = self.map("lost")
        for index, name in enumerate(abi.LOST):
            yield name, sum(counts.per_cpu(abi.U32(index)))

    def calls(self) -> dict[str, int]:
        """Calls of each symbol since the start; only symbols that were called."""
        counts = self.map("hits").per_cpu_array(len(SYMBOLS))
        return {symbol.name: count for symbol, count in zip(SYMBOLS, counts, strict=True) if count}

    def set_sm_count(self, count: int) -> None:
        """How many SMs each device has, for the kernel to count waves of blocks; 0: they differ, or it is unknown."""
        counts, first = self.map("sm_counts"), abi.U32(0)
        known = counts.get(first)
        if known is None or known.value != count:
            counts.put(first, abi.U32(count))

    def close(self) -> None:
        """Detaches everything."""
        self._files.close()
        self.bpf.close()

    def __enter__(self) -> LibcudaProbes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _allow_many_files() -> None:
    """A single uprobe is two descriptors, so before Linux 6.6 two libraries are more than the usual 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _can_deny(path: Path) -> bool:
    """Whether this kernel lets a uprobe change registers (Linux ≥ 6.18): loads a program that does, and unloads it."""
    if not path.is_file():  # no reason to observe nothing
        _log.info("allocations are held, not denied: %s is missing; run `make bpf`, or reinstall", path)
        return False
    try:
        with BpfObject(path):
            return True
    except ProbeError as error:
        _log.info("allocations are held, not denied: the kernel does not let probes change registers: %s", error)
        return False


def _load(path: Path, can_deny: bool) -> BpfObject:
    also = {DENYING} if can_deny else set[str]()
    return load_uprobes(path, {program for pair in PROGRAMS.values() for program in pair if program} | also, also=also)


def _function(offset: int, symbol: Symbol, library: int, place: ProbePlace) -> ProbedFunction:
    return ProbedFunction(symbol.name, offset, symbol.cookie(library), *PROGRAMS[symbol.role], place)
