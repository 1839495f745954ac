# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The calls of one function, in the processes that are wanted: bpf/uprobe.bpf.c loaded, attached and read.

A file is attached once for each function, whatever the paths that lead to it, and a process counts with the probe that
was attached for it alone. What nobody wants any more is detached, and so is a file that somebody writes over.
"""

from __future__ import annotations

import ctypes as c
import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from agent import layout
from agent.errors import ProbeError
from agent.functions import function_offset
from agent.layout import U32, U64
from agent.libbpf import BpfObject, Link, Map
from agent.libraries import FileId, opened
from agent.library_changes import LibraryChanges
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.policy.model import UprobeSource
from enforce.signals.window import Buckets

_log = logging.getLogger(__name__)
TALLIES = ("abandoned", "full")
_MOST_TARGETS = 256
_PROGRAMS = ("uprobe_return", "uprobe_enter")  # returns first: an entry whose return is not watched would be waited for


class Watched(c.Structure):
    """struct watched of bpf/uprobe.h."""

    _fields_ = [("watch", U32), ("target", U32)]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A function of one file, as it was then."""

    file: FileId
    version: tuple[int, int]  # size and time of the last change
    symbol: str | None
    offset: int | None
    nothrow: bool


@dataclass(slots=True)
class _Target:
    number: int
    links: list[Link]
    watch: int | None  # of inotify


class Calls:
    """Belongs to one thread, but for `buckets`, which any may call. `close` takes every probe away."""

    def __init__(self, object_path: Path, proc: Procfs) -> None:
        self._proc = proc
        self._bpf = _load(object_path)
        self._wanted: Map = self._bpf.map("wanted", U32, Watched)
        self._recorded: Map = self._bpf.map("recorded", U32, layout.Latency)
        self._tallies: Map = self._bpf.map("tallies", U32, U64)
        for program in ("uprobe_exit", "uprobe_exec"):
            self._bpf.attach(program)
        self._numbers = itertools.count(1)
        self._targets: dict[_Wanted, _Target] = {}
        self.changes = LibraryChanges()

    def begin(self, watch: int) -> None:
        """From now on calls can be counted under this number. OSError when there are too many."""
        self._recorded.put(U32(watch), layout.Latency())

    def end(self, watch: int) -> None:
        """No more of it."""
        self._recorded.delete(U32(watch))

    def buckets(self, watch: int) -> Buckets | None:
        """How long the calls took that were counted under this number."""
        found = self._recorded.get(U32(watch))
        return bytes(found.buckets) if found is not None else None

    def follow(self, process: ProcessId, source: UprobeSource, watch: int) -> int:
        """Counts the process's calls; returns the target's number. GoneError, ProbeError, SetupError, OSError."""
        target = self._ensure(process, source)
        self._wanted.put(U32(process.tgid), Watched(watch, target.number))
        if not self._proc.is_alive(process):  # after it: the kernel forgets one that ends, but only once
            self.unfollow(process)
        return target.number

    def unfollow(self, process: ProcessId) -> None:
        """Its calls count no more."""
        self._wanted.delete(U32(process.tgid))

    def retain(self, targets: Collection[int]) -> None:
        """Takes all other probes away."""
        for wanted, target in list(self._targets.items()):
            if target.number not in targets:
                self._drop(wanted, target)

    def changed(self) -> set[int]:
        """Takes the probes off files that somebody began to write over; which targets that were."""
        watches = self.changes.take()
        gone = [(wanted, target) for wanted, target in self._targets.items() if target.watch in watches]
        for wanted, target in gone:
            _log.warning("a program with a timed function is written over in place: its probes go until that is done")
            self._drop(wanted, target)
        return {target.number for _, target in gone}

    def tallies(self) -> dict[str, int]:
        """Calls that were not recorded, by reason."""
        return {name: sum(self._tallies.per_cpu(U32(index))) for index, name in enumerate(TALLIES)}

    def close(self) -> None:
        """Detaches everything."""
        self.changes.close()
        self._bpf.close()

    def _ensure(self, process: ProcessId, source: UprobeSource) -> _Target:
        with opened(self._proc, process, source.binary) as (descriptor, facts, file):
            version = (facts.st_size, facts.st_mtime_ns)
            wanted = _Wanted(file, version, source.symbol, source.offset, source.nothrow)
            if wanted not in self._targets:
                self._targets[wanted] = self._attach(descriptor, source)
            return self._targets[wanted]

    def _attach(self, descriptor: int, source: UprobeSource) -> _Target:
        if len(self._targets) >= _MOST_TARGETS:
            raise ProbeError(f"more than {_MOST_TARGETS} functions are timed; write fewer rules with signal uprobe")
        watch = self.changes.watch(descriptor, source.binary)  # first, so that no change after the look is missed
        target = _Target(next(self._numbers), [], watch)
        path = f"/proc/self/fd/{descriptor}"  # that very file, whatever the path is by now
        try:
            offset = function_offset(descriptor, source.symbol, source.offset, source.nothrow)
            for program in _PROGRAMS:
                at_return = program == "uprobe_return"
                target.links += self._bpf.attach_uprobes(program, path, [(offset, target.number)], at_return=at_return)
        except BaseException:
            self._release(target)
            raise
        _log.info("timing %s of %s", source.symbol or hex(offset), source.binary)
        return target

    def _drop(self, wanted: _Wanted, target: _Target) -> None:
        del self._targets[wanted]
        self._release(target)

    def _release(self, target: _Target) -> None:
        if target.watch is not None and not any(other.watch == target.watch for other in self._targets.values()):
            self.changes.forget(target.watch)
        for link in reversed(target.links):  # entries first
            self._bpf.detach(link)


def _load(path: Path) -> BpfObject:
    """For uprobe_multi where the kernel has it (Linux ≥ 6.6), else for single uprobes."""
    try:
        return BpfObject(path, multi=set(_PROGRAMS))
    except ProbeError:
        return BpfObject(path)
