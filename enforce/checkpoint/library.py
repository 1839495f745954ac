# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which driver library the helper is to load, and whether it has the calls. The file is read, never loaded here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agent.discovery import host_libraries
from agent.elf import exported_functions
from agent.errors import ProbeError, SetupError
from enforce.checkpoint.driver import CALLS, PREFIX

_Version = tuple[str, int, int]  # path, inode, mtime
_AGAIN_NS = 60_000_000_000  # looking starts programs, and whoever asks may ask at every decision


@dataclass(slots=True)
class DriverLibrary:
    """The first of the node's libraries; looked for again when it was replaced. `extra` are configured paths.

    That there is none is believed for a minute.
    """

    extra: tuple[str, ...] = ()
    find: Callable[[Iterable[str]], list[str]] = host_libraries
    clock: Callable[[], int] = time.monotonic_ns
    _known: _Version | None = None
    _missing: tuple[str, ...] = field(default=())
    _failed: tuple[int, str] | None = None  # when, why

    def path(self) -> str:
        """SetupError when there is none, or one before R570."""
        version = self._looked_for()
        if self._missing:
            wanted = ", ".join(self._missing)
            raise SetupError(f"{version[0]} has no {wanted}: driver R570 or newer is needed")
        return version[0]

    def _looked_for(self) -> _Version:
        version = _version(self._known[0]) if self._known else None
        if version is not None and version == self._known:
            return version
        if self._failed is not None and self.clock() - self._failed[0] < _AGAIN_NS:
            raise SetupError(self._failed[1])
        try:
            version = version or self._find()
            self._missing = _missing(version[0])
        except SetupError as error:
            self._failed = self.clock(), str(error)
            raise
        self._known, self._failed = version, None
        return version

    def _find(self) -> _Version:
        for path in self.find(self.extra):
            version = _version(path)
            if version is not None:
                return version
        raise SetupError("no libcuda.so.1 on this node: without it nothing can be locked; give its path with --libcuda")


def _version(path: str) -> _Version | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return path, facts.st_ino, facts.st_mtime_ns


def _missing(path: str) -> tuple[str, ...]:
    try:
        exports = exported_functions(path, PREFIX)
    except (ProbeError, OSError) as error:
        raise SetupError(f"{path}: {error}") from error
    return tuple(PREFIX + call for call in CALLS if PREFIX + call not in exports)
