# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes on libcuda: one loaded BPF object, attached to every copy of the library that was found.

Each file is attached once, whatever the paths that lead to it. What could not be attached is remembered with its
reason, for the exported status. The observer's thread attaches; the event reader's thread detaches from files that are
being written over.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent.containers.index import ContainerIndex
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import ProbeError
from agent.core.model import HOST, ContainerKey, ProbeCounts, ProbeStatus, ProcessId
from agent.node.elf import exported_extents
from agent.node.instructions import ProbePlace, places, returns
from agent.node.proc_parse import MappedFile
from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.attachment import Attachment, Attachments, ProbedFunction
from agent.probes.libbpf import BpfObject, Map, load_uprobes
from agent.probes.libraries import FileId, FileNumbers, OpenFile, opened
from agent.probes.return_probes import LOST
from agent.probes.symbols import (
    DENYING,
    PROGRAMS,
    SYMBOLS,
    WITHOUT_RETURNS,
    Symbol,
    SymbolRole,
    by_offset,
    unknown_versions,
)

_log = logging.getLogger(__name__)
_MOST_LIBRARIES = 1023  # that are probed
_MOST_OF_ONE_CONTAINER = 32  # of these, brought by it: its copies must not leave none for others
_MOST_UNREADABLE = 256  # files that could not be probed and are remembered, so that they are read once
_MOST_OWNERS = 256
_MOST_REWRITTEN = 4096  # files that are remembered
_LONGEST_REST_NS = 60 * NS_PER_SECOND  # without probes, of a file that is rewritten again and again
_FORGET_REWRITES_NS = 2 * _LONGEST_REST_NS
_LIBRARY_NUMBERS = (1 << 16) - 1  # what the cookie has room for; 0 is none


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
    returns: list[int] = field(default_factory=list)  # the cookies that it has in the map of that name
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
        for role in SymbolRole:
            names = {symbol.name for symbol in SYMBOLS if symbol.role is role}
            counts[role.value] = ProbeCounts(
                len(names & attached), len(names & absent), len(names & self.failed.keys()), len(names & off)
            )
        return counts


class _Rewritten:
    """Files that lost their probes because they were written over: each time they stay without them for longer.

    Attaching and detaching is far dearer than a write, so that a file which is rewritten in a loop would keep the agent
    busy. The first time costs no wait.
    """

    def __init__(self) -> None:
        self._known: dict[FileId, tuple[int, int]] = {}  # how often, and when last
        self.put_off = 0  # attachments that have to wait
        self.dropped = 0  # libraries that lost their probes so

    def note(self, file: FileId, now_ns: int) -> None:
        """It lost its probes."""
        self.dropped += 1
        times, last_ns = self._known.pop(file, (0, now_ns))
        self._known[file] = (1 if now_ns - last_ns > _FORGET_REWRITES_NS else times + 1, now_ns)
        while len(self._known) > _MOST_REWRITTEN:
            del self._known[next(iter(self._known))]

    def require_rest(self, file: FileId, now_ns: int) -> None:
        """ProbeError while it is too early to attach to it again."""
        times, last_ns = self._known.get(file, (0, 0))
        wait_ns = min(_LONGEST_REST_NS, NS_PER_SECOND << min(times, 8)) if times > 1 else 0
        if now_ns - last_ns < wait_ns:
            self.put_off += 1
            later_seconds = (wait_ns - now_ns + last_ns) / NS_PER_SECOND
            raise ProbeError(f"it is rewritten again and again: probed {later_seconds:.0f} s later")


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
        self.bpf.attach("process_fork")
        self.bpf.attach("process_exit")
        self.bpf.attach("process_exec")
        self._numbers = FileNumbers(_LIBRARY_NUMBERS)
        self.refused = 0  # libraries that were not probed because there were too many
        self._rewritten = _Rewritten()
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

    def ensure_open(self, file: OpenFile, process: ProcessId) -> AttachedLibrary:
        """The same for a file that is open already."""
        return self._ensure(file, process)

    def _ensure(self, file: OpenFile, process: ProcessId | None) -> AttachedLibrary:
        with self._lock:
            attachment = self._files.find(file)
            if attachment is not None:
                return self._libraries[attachment]
            self._rewritten.require_rest(file.file, monotonic_ns())
            owner = self._owners.container_of(process).key if process else None
            if full := self._full(owner):
                return self._refuse(file, full)
            library = self._attach(file, owner)
            self._forget_unreadable()
            return library

    def _refuse(self, file: OpenFile, full: str) -> AttachedLibrary:
        if not self.refused:
            _log.warning("%s is not probed: %s; further ones are only counted", file.path, full)
        self.refused += 1
        return AttachedLibrary(0, file.path, failed={"*": full})

    def _full(self, owner: ContainerKey | None) -> str | None:
        """Why no further library of this container is probed."""
        if not self._numbers.is_free:
            return f"all of {_LIBRARY_NUMBERS} numbers of libraries are in force"
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

    @property
    def clashes(self) -> int:
        """Functions whose cookie another library had in use."""
        return self._numbers.clashes

    def changes_fd(self) -> int | None:
        """Readable when `drop_changed` has something to do; None where the kernel does not report writes."""
        return self._files.changes.fileno()

    def drop_changed(self) -> None:
        """Detaches from files that are being written over; `ensure` attaches to what they become."""
        watches = self._files.changes.take()  # without the lock: it is held while a library is attached
        if watches:
            with self._lock:
                dropped = self._files.drop_changed(watches)
                for attachment in dropped:
                    self._rewritten.note(attachment.file, monotonic_ns())

    def _forget(self, attachment: Attachment) -> None:
        library = self._libraries.pop(attachment, None)
        if library is not None:
            self._release(library, attachment.file)

    def _release(self, library: AttachedLibrary, file: FileId) -> None:
        """Once none of its probes is there any more, its number may be another's."""
        self.map("files").put(abi.U32(library.number), abi.U64(0))
        for cookie in library.returns:
            self.map("returns").delete(abi.U64(cookie))
        self._numbers.release(file)

    def _attach(self, file: OpenFile, owner: ContainerKey | None) -> AttachedLibrary:
        library = AttachedLibrary(0, file.path, owner=owner)
        probed: list[ProbedFunction] = []

        def functions(descriptor: int) -> list[ProbedFunction]:
            probed.extend(self._functions(library, file.file, descriptor))
            return probed

        try:
            library.attachment = self._files.attach(file, functions)
        except BaseException:
            self._release(library, file.file)
            raise
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
        library.number = self._numbers.take(file)
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
        allocating, _ = PROGRAMS[SymbolRole.ALLOC]
        functions = [replace(one, entry=DENYING) if one.entry == allocating else one for one in functions]
        denying = {one.probe_offset: one for one in functions if one.entry == DENYING}
        try:
            found = returns(descriptor, denying, [one.probe_offset for one in functions])
        except (ProbeError, OSError) as error:  # it was cut or written over since its functions were found
            _log.warning("%s: %s", library.path, error)
            found = {}
        taken = [at for at, distance in found.items() if not self._put_return(library, denying[at].cookie, distance)]
        return [replace(one, entry=allocating) if one.probe_offset in taken else one for one in functions]

    def _put_return(self, library: AttachedLibrary, cookie: int, distance: int) -> bool:
        """False where the cookie is in use: a denied call would go on where it does in another library."""
        if self.map("returns").add(abi.U64(cookie), abi.S64(distance)):
            library.returns.append(cookie)
            return True
        self._numbers.clashes += 1
        _log.error("%s: allocations are held, not denied: cookie %#x is in use", library.path, cookie)
        return False

    def libraries(self) -> tuple[AttachedLibrary, ...]:
        """All files that are remembered: those that are probed, and the last that could not be."""
        return tuple(self._libraries.values())

    @property
    def dropped(self) -> int:
        """Libraries that lost their probes because they were being written over."""
        return self._rewritten.dropped

    @property
    def put_off(self) -> int:
        """Attachments that had to wait because the file is rewritten again and again."""
        return self._rewritten.put_off

    def lost(self) -> Iterator[tuple[str, int]]:
        """What the kernel side dropped since the start, by reason."""
        return zip(abi.LOST, self.map("lost").per_cpu_array(len(abi.LOST)), strict=True)

    def expire_charges(self) -> None:
        """Gives back what allocations hold that have not returned in time; `lost` counts them. For each tick."""
        self.bpf.run("expire_charges")

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
