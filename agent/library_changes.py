# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Word of a probed file that somebody writes over, as it begins.

A uprobe stays at its offset whatever is written there: a program that maps the new content would meet a breakpoint in
the middle of an instruction. So the probes have to go before the writer is done, not at the next look. inotify(7);
where the kernel grants no watch, the next look has to do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from typing import Final

_log = logging.getLogger(__name__)
_EVENT: Final = struct.Struct("=iIII")  # watch, mask, cookie, length of the name: none, for a file
_MODIFY: Final = 0x2
_READ_BYTES: Final = 64 << 10


class LibraryChanges:
    """`fileno` is readable when there is something to `take`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._descriptor < 0:
            _log.warning("no inotify: %s; a libcuda that is written over is noticed late", _reason())

    def fileno(self) -> int | None:
        """None where there is no inotify."""
        return self._descriptor if self._descriptor >= 0 else None

    def watch(self, descriptor: int, path: str) -> int | None:
        """The number of the watch on an open file, which messages call `path`; None where there is none."""
        if self._descriptor < 0:
            return None
        watch = int(self._libc.inotify_add_watch(self._descriptor, b"/proc/self/fd/%d" % descriptor, _MODIFY))
        if watch < 0:
            _log.warning("%s is not watched: %s; if it is written over, that is noticed late", path, _reason())
        return watch if watch >= 0 else None

    def forget(self, watch: int) -> None:
        """Its file may be gone, and the watch with it."""
        self._libc.inotify_rm_watch(self._descriptor, watch)

    def take(self) -> set[int]:
        """The watches whose files were written since. Does not wait."""
        try:
            events = os.read(self._descriptor, _READ_BYTES)  # once: a file that is written all the time has no end
        except BlockingIOError:
            return set()
        return {watch for watch, mask, _, _ in _EVENT.iter_unpack(events) if mask & _MODIFY}

    def close(self) -> None:
        """Takes all watches away."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
