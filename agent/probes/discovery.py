# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Finds every copy of libcuda on the node: the host's, and those that containers bring, under whatever name.

A probe on a file covers past and future processes, so a file should be known before its first launch. The host's
library is attached at the start and searched again in each round, since a driver upgrade replaces it; others are found
by name (`Discovery`) in the maps of processes as soon as NVML lists them, and by reading the maps of all young
processes in each round.

Processes that work on a GPU without launches that are seen are searched by content (`ContentSearch`): for other names,
odd paths, memfd, mapped over. Only these: other files export the driver's functions too (a library that passes calls
on), and what such a one passes on would be counted twice if it were probed everywhere. Files are opened by the mapping,
never by the path, and read once for each content; what cannot be opened or read is counted.

Both are bounded: an unchanged process is not read again for a while, a round ends in time, and the next one begins with
processes that have waited long.
"""

from __future__ import annotations

import ctypes.util
import itertools
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import GoneError, ProbeError, SetupError
from agent.core.model import ProcessId
from agent.node.elf import exported_functions
from agent.node.proc_parse import MappedFile
from agent.node.procfs import Procfs
from agent.probes.libcuda import LibcudaProbes
from agent.probes.libraries import opened_mapping

_log = logging.getLogger(__name__)
DRIVER_FUNCTIONS: Final = frozenset({"cuInit", "cuLaunchKernel"})  # that every program of the driver calls
_NAME = re.compile(r"libcuda\.so(\.[0-9.]+)?")
_HOST_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/run/nvidia/driver/usr/lib64",
)
_TIDY_ROUNDS = 30
_MOST_IDLE = 64  # copies that stay attached without a process that maps them: the next container may
ROUND_NS = NS_PER_SECOND  # the tick waits for a round to end
FIRST_ROUND_NS = 10 * NS_PER_SECOND  # and an agent that says that it is ready has looked at what ran before
_MOST_OF_ONE = 8  # copies in one process: no program has more
_LOOKS = 30  # rounds in which the maps of a process without libcuda are read again: frameworks load it late
_MOST_CONTENTS: Final = 4096
_REREAD_NS: Final = 30 * NS_PER_SECOND  # a file may have become another one meanwhile
_FORGET_NS: Final = 2 * _REREAD_NS


def host_libraries(extra: Iterable[str]) -> list[str]:
    """Real paths of the node's own libcuda: as configured, in the linker's path, in the usual folders."""
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_HOST_FOLDERS]
    candidates = [*extra, *(f"{folder}/libcuda.so.1" for folder in folders if folder)]
    found = ctypes.util.find_library("cuda")
    if found and "/" in found:
        candidates.append(found)
    return list(dict.fromkeys(os.path.realpath(path) for path in candidates if Path(path).is_file()))


class Discovery:
    """Reads the maps of processes, of each until it has a libcuda or has had none for long."""

    def __init__(self, probes: LibcudaProbes, proc: Procfs) -> None:
        self._probes, self._proc = probes, proc
        self._done: set[ProcessId] = set()
        self._found: set[ProcessId] = set()  # of these, those that have a libcuda
        self._dropped = 0
        self._looks: dict[ProcessId, int] = {}
        self._turns = itertools.count()
        self._turn: dict[ProcessId, int] = {}  # when its maps were last read, or it was first seen
        self._extra: tuple[str, ...] = ()
        self._host: set[int] = set()  # numbers of the host's own libraries now
        self._rounds = 0
        self.refused = 0  # processes whose files this agent may not read

    def attach_host(self, extra: Iterable[str]) -> int:
        """Attaches the node's libraries; returns how many there are. SetupError when a configured one is no file."""
        paths = host_libraries(extra)
        for wanted in extra:
            if os.path.realpath(wanted) not in paths:
                raise SetupError(f"{wanted}: no such file; give the path of a libcuda.so.1")
        self._extra = tuple(extra)
        self._host = {self._probes.ensure(path).number for path in paths}
        return len(paths)

    def _attach_host_again(self) -> None:
        """Attaches the new file of a library that was replaced; one that is being written waits for the next round."""
        numbers = set()
        for path in host_libraries(self._extra):
            try:
                numbers.add(self._probes.ensure(path).number)
            except (GoneError, SetupError, ProbeError, OSError) as error:
                _log.debug("%s", error)
        self._host = numbers

    def look(self, ends_ns: int | None = None) -> None:
        """One round: the host's libraries, and all processes that may still bring another, until about `ends_ns`."""
        ends_ns = monotonic_ns() + ROUND_NS if ends_ns is None else ends_ns
        self._attach_host_again()
        self._rounds += 1
        if self._rounds % _TIDY_ROUNDS == 0:
            self._tidy()
        if self._probes.dropped != self._dropped:  # what was written over is another library now, in all processes
            self._dropped = self._probes.dropped
            self._done.clear()
            self._found.clear()
            self._looks.clear()
        alive = set(self._alive())
        self.look_at(alive - self._done, ends_ns)
        self._done &= alive
        self._found &= alive
        self._looks = {process: count for process, count in self._looks.items() if process in alive}
        self._turn = {process: turn for process, turn in self._turn.items() if process in alive}

    def _alive(self) -> Iterator[ProcessId]:
        for tgid in self._proc.tgids():
            try:
                yield self._proc.process_id(tgid)
            except (GoneError, SetupError):
                continue

    def look_at(self, processes: Iterable[ProcessId], ends_ns: int) -> None:
        """Attaches what these have mapped, once; those that are not reached by `ends_ns` come in the next call."""
        for process in self._in_turn(set(processes) - self._found):
            self._try(process, ends_ns)
            if monotonic_ns() > ends_ns:
                break

    def _in_turn(self, processes: Collection[ProcessId]) -> Iterable[ProcessId]:
        """Alternates between the one that was read least often and the one that waits longest.

        New ones should be known before they launch, but a container may start new ones without an end.
        """
        for process in processes:
            if process not in self._turn:
                self._turn[process] = next(self._turns)
        newest = sorted(processes, key=lambda one: self._looks.get(one, 0))
        longest = sorted(processes, key=self._turn.__getitem__)
        return dict.fromkeys(itertools.chain.from_iterable(zip(newest, longest, strict=True)))

    def _try(self, process: ProcessId, ends_ns: int) -> None:
        self._turn[process] = next(self._turns)
        try:
            self._look_at(process, ends_ns)
        except SetupError as error:  # one process, or all of them: what is probed already goes on
            if not self.refused:
                _log.warning("%s; further ones are only counted", error)
            self.refused += self._looks.get(process, 0) <= 1  # each once, however often it is looked at
        except (GoneError, ProbeError, OSError) as error:
            _log.debug("%s", error)
        if self._looks.get(process, 0) >= _LOOKS:
            self._done.add(process)

    def _look_at(self, process: ProcessId, ends_ns: int) -> None:
        look = self._looks.get(process, 0)
        self._looks[process] = look + 1
        libraries = self._proc.mapped(process.tgid, lambda name: _NAME.fullmatch(name) is not None)
        if len(libraries) > _MOST_OF_ONE and process not in self._done:
            most = f"only the first {_MOST_OF_ONE} are probed"
            _log.warning("process %d maps %d files called libcuda: %s", process.tgid, len(libraries), most)
        libraries = libraries[:_MOST_OF_ONE]
        first = look % max(1, len(libraries))  # another in each round, which may end before the last
        for place, library in enumerate([*libraries[first:], *libraries[:first]]):
            if place and monotonic_ns() > ends_ns:
                return
            if library.deleted:
                self._probes.ensure_mapped(library, process)
            else:
                self._probes.ensure(library.path, process)
        if libraries:
            self._done.add(process)
            self._found.add(process)

    def _tidy(self) -> None:
        """Detaches from files that no process maps any more, when there are many: containers bring them and end."""
        probed = (library for library in self._probes.libraries() if not library.unreadable)
        idle = [library for library in probed if library.number not in self._host]
        if len(idle) <= _MOST_IDLE:
            return
        names = {library.path.rpartition("/")[2] for library in idle}
        mapped: set[int] = set()
        for tgid in self._proc.tgids():
            try:
                found = self._proc.mapped(tgid, names.__contains__)
            except (GoneError, SetupError):
                continue
            mapped.update(file.inode for file in found)
        unused = [library for library in idle if library.inode not in mapped]
        for library in unused[: len(idle) - _MOST_IDLE]:
            _log.info("%s: no process maps it any more, its probes are detached", library.path)
            self._probes.drop(library)


class Contents:
    """Which files have the driver's functions. Each content is read once, while it is among the last seen."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], bool] = {}
        self.unreadable = 0  # files that are no library that can be read

    def is_driver(self, descriptor: int) -> bool:
        """Whether the open file exports DRIVER_FUNCTIONS."""
        facts = os.fstat(descriptor)
        key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if key not in self._known:
            self._known[key] = self._examine(descriptor)
            while len(self._known) > _MOST_CONTENTS:
                del self._known[next(iter(self._known))]
        return self._known[key]

    def _examine(self, descriptor: int) -> bool:
        try:
            return exported_functions(descriptor, "cu").keys() >= DRIVER_FUNCTIONS
        except (ProbeError, OSError) as error:
            self.unreadable += 1
            _log.debug("%s", error)
            return False


class ContentSearch:
    """Finds driver libraries by their content in the processes that it is given. For the observing thread."""

    def __init__(self, probes: LibcudaProbes, proc: Procfs) -> None:
        self._probes, self._proc = probes, proc
        self._contents = Contents()
        self._read: dict[ProcessId, tuple[int, tuple[MappedFile, ...]]] = {}  # when, and what it had mapped
        self._unopened = 0

    def look(self, processes: Collection[ProcessId], ends_ns: int) -> None:
        """Attaches every file with the driver's functions that these run code of, until about `ends_ns`."""
        now_ns = monotonic_ns()
        self._read = {process: read for process, read in self._read.items() if now_ns - read[0] < _FORGET_NS}
        for process in sorted(processes, key=lambda one: self._read.get(one, (0, ()))[0]):
            if monotonic_ns() > ends_ns:
                return
            try:
                self._look_at(process, ends_ns)
            except (GoneError, SetupError, ProbeError, OSError) as error:
                self._unopened += 1
                _log.debug("%s", error)

    def lost(self) -> dict[str, int]:
        """Files that could not be looked into, for Snapshot.lost."""
        return {"libraries:unopened": self._unopened, "libraries:unreadable": self._contents.unreadable}

    def _look_at(self, process: ProcessId, ends_ns: int) -> None:
        now_ns, files = monotonic_ns(), self._proc.mapped_code(process.tgid)
        read_ns, before = self._read.get(process, (0, ()))
        if before == files and now_ns - read_ns < _REREAD_NS:
            return
        self._read[process] = (now_ns, ())
        for file in files:
            if monotonic_ns() > ends_ns:
                return
            self._look_into(process, file)
        self._read[process] = (now_ns, files)

    def _look_into(self, process: ProcessId, file: MappedFile) -> None:
        try:
            with opened_mapping(self._proc, process, file) as mapped:
                if self._contents.is_driver(mapped.descriptor):
                    self._probes.ensure_open(mapped, process)
        except GoneError as error:  # unmapped since, or no regular file: a device's memory
            self._unopened += 1
            _log.debug("%s", error)
