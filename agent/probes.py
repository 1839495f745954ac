# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The probes: one loaded BPF object, attached to every copy of libcuda that was shown to it.

Each file is attached once, whatever the paths that lead to it. What could not be attached is remembered with its
reason, for the status that people see.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agent import layout
from agent.elf import function_offsets
from agent.errors import ProbeError
from agent.libbpf import BpfObject, Map
from agent.libraries import FileId, layer_paths, parse_mounts, real_file
from agent.model import ProbeStatus
from agent.procfs import Procfs
from agent.symbols import PROGRAMS, SYMBOLS, Symbol

_log = logging.getLogger(__name__)
_MOST_LIBRARIES = 1023  # entries of the map `retired`; number 0 is not used


@dataclass(slots=True)
class AttachedLibrary:
    """One file: symbol → its links, or why there are none."""

    number: int
    path: str
    links: dict[str, list[int]] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def status(self) -> ProbeStatus:
        """The counts that are exported."""
        return ProbeStatus(self.path, len(self.links), len(self.absent), len(self.failed))


class Probes:
    """Loads the object and attaches it. A context manager; leaving it takes every probe away."""

    def __init__(self, object_path: Path, proc: Procfs) -> None:
        self._proc = proc
        self.bpf = BpfObject(object_path)
        layout.check(self.bpf)
        self._maps: dict[str, Map] = {}
        self._libraries: dict[FileId, AttachedLibrary] = {}
        self.bpf.attach("process_exit")

    def map(self, name: str) -> Map:
        """The map `name` with the types of agent/layout.py."""
        if name not in self._maps:
            self._maps[name] = self.bpf.map(name, *layout.MAPS[name])
        return self._maps[name]

    def ensure(self, path: str, tgid: int | None = None) -> AttachedLibrary:
        """Attaches the file at `path` (as `tgid` sees it) unless it is. GoneError when there is no such file."""
        viewer = os.getpid() if tgid is None else tgid
        descriptor = self._proc.open_inside(viewer, path)
        try:
            layers = layer_paths(parse_mounts(self._proc.mounts(viewer)), path)
            file = real_file(os.fstat(descriptor), layers)
            if file not in self._libraries:
                self._libraries[file] = self._attach(path, f"/proc/self/fd/{descriptor}")
            return self._libraries[file]
        finally:
            os.close(descriptor)

    def _attach(self, path: str, open_path: str) -> AttachedLibrary:
        library = AttachedLibrary(len(self._libraries) + 1, path)
        if library.number > _MOST_LIBRARIES:
            library.failed["*"] = f"more than {_MOST_LIBRARIES} copies of libcuda on one node"
            return library
        try:
            offsets = function_offsets(open_path, {symbol.name for symbol in SYMBOLS})
        except ProbeError as error:
            library.failed["*"] = str(error)
            _log.warning("%s: %s", path, error)
            return library
        taken: set[int] = set()
        for symbol in SYMBOLS:
            offset = offsets.get(symbol.name)
            if offset is None:
                library.absent.append(symbol.name)
            elif offset not in taken:  # two names of one function are one probe
                taken.add(offset)
                self._attach_symbol(library, open_path, symbol, offset)
        _log.info("attached %d symbols of %s", len(library.links), path)
        return library

    def _attach_symbol(self, library: AttachedLibrary, path: str, symbol: Symbol, offset: int) -> None:
        entry, at_return = PROGRAMS[symbol.role]
        cookie, links = symbol.cookie(library.number), []
        try:
            if at_return:  # first the return: an entry without one would wait for it
                links.append(self.bpf.attach_uprobe(at_return, path, offset, cookie, at_return=True))
            links.append(self.bpf.attach_uprobe(entry, path, offset, cookie, at_return=False))
            library.links[symbol.name] = links
        except ProbeError as error:
            for link in links:
                self.bpf.detach(link)
            library.failed[symbol.name] = str(error)
            _log.warning("%s", error)

    def libraries(self) -> tuple[AttachedLibrary, ...]:
        """All files seen so far."""
        return tuple(self._libraries.values())

    def lost(self) -> Iterator[tuple[str, int]]:
        """What the kernel side had to drop since start, by reason."""
        counts = self.map("lost")
        for index, name in enumerate(layout.LOST):
            yield name, sum(counts.per_cpu(layout.U32(index)))

    def close(self) -> None:
        """Detaches everything."""
        self.bpf.close()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
