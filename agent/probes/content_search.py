# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Finds driver libraries by their content, whatever they are called: other names, odd paths, memfd, mapped over.

Only in processes that work on a GPU without launches that are seen. Other files export the driver's functions too (a
library that passes calls on), and what such a one passes on would be counted twice if it were probed everywhere.

Files are opened by the mapping, never by the path, and read once for each content. What cannot be opened or read is
counted. Bounded: an unchanged process is not read again for a while, a round ends in time, and the next one begins with
the process that has waited longest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
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
_MOST_CONTENTS: Final = 4096
AGAIN_NS: Final = 30 * NS_PER_SECOND  # a file may have become another one meanwhile
_FORGET_NS: Final = 2 * AGAIN_NS


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
    """See the module. For the observing thread."""

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
        if before == files and now_ns - read_ns < AGAIN_NS:
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
