# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`addresses.py LIBCUDA`: where the driver library's functions are for a program that asks for them.

Reads {"exports": […], "names": […], "versions": […]} and writes the answers, both as JSON. An address is given as the
offset in the library's file, which is what a probe is attached to; outside of that file as the name of what is there.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = {"default": 0, "legacy": 1, "per-thread": 2}  # enum CUdriverProcAddress_flags
_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ *(.*)")


class Places:
    """The mappings of a process, as /proc/PID/maps has them, and which of them are of the library.

    These are known by their path: the inode beside it is not the file's in a sandboxed kernel and on some file systems.
    """

    def __init__(self, library: str, maps: str) -> None:
        wanted = os.stat(library)
        found = filter(None, map(_MAPPED.match, maps.splitlines()))
        self._ranges = [(int(m[1], 16), int(m[2], 16), int(m[3], 16), self._is(m[4], wanted), m[4]) for m in found]

    @staticmethod
    def _is(path: str, wanted: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.stat(path), wanted)
        except OSError:
            return False

    def of(self, address: int) -> int | str:
        """An address as its offset in the library's file, or as the name of what is there."""
        for start, end, offset, ours, path in self._ranges:
            if start <= address < end:
                return address - start + offset if ours else path or "memory of no file"
        return "nowhere"


def asked(library: Any, names: list[str], versions: list[int], places: Places) -> Iterator[dict[str, Any]]:
    """What cuGetProcAddress gives for each name, flag and version; repetitions are listed once."""
    ask = getattr(library, "cuGetProcAddress_v2", None)
    with_status = ask is not None
    ask = ask or library.cuGetProcAddress
    ask.argtypes = [c.c_char_p, c.POINTER(c.c_void_p), c.c_int, c.c_uint64, *([c.POINTER(c.c_int)] * with_status)]
    for name in names:
        for flag, value in FLAGS.items():
            before: int | None = None
            for version in versions:
                pointer, status = c.c_void_p(), c.c_int()
                more = [c.byref(status)] if with_status else []
                result = ask(name.encode(), c.byref(pointer), version, value, *more)
                if result == 0 and pointer.value and pointer.value != before:
                    before = pointer.value
                    yield {"name": name, "flag": flag, "version": version, "place": places.of(pointer.value)}


def main() -> None:
    """Reads one question, writes one answer."""
    path, question = sys.argv[1], json.load(sys.stdin)
    library = c.CDLL(path)
    initialised = library.cuInit(0)
    version = c.c_int()
    library.cuDriverGetVersion(c.byref(version))
    places = Places(path, Path("/proc/self/maps").read_text())
    linked = {}
    for name in question["exports"]:
        function = getattr(library, name, None)
        if function is not None:
            linked[name] = places.of(c.cast(function, c.c_void_p).value or 0)
    versions = sorted({version.value, *(one for one in question["versions"] if one <= version.value)})
    json.dump(
        {
            "initialised": initialised,
            "version": version.value,
            "linked": linked,
            "asked": list(asked(library, question["names"], versions, places)),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
