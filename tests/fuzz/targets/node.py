# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a container brings along: the ELF files that it maps, and the cgroups that it makes."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from typing import Final

from agent.containers.identity import identify, parse_cgroup
from agent.core.errors import ProbeError
from agent.node.elf import exported_extents
from agent.node.elf_functions import function_offset
from tests.fuzz.target import Target, require


@cache
def _file() -> int:
    return os.memfd_create("input", os.MFD_CLOEXEC)


def _written(data: bytes) -> int:
    """A descriptor of a file that holds the input: the same each time."""
    file = _file()
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def elf(data: bytes) -> None:
    """A libcuda: its functions, to be probed."""
    with suppress(ProbeError):
        for name, extent in exported_extents(_written(data), "cu").items():
            require(0 <= extent.offset < len(data), "a probe beyond the end of the file")
            require(name.isascii() and name.startswith("cu"), "a function that was not asked for")


def elf_function(data: bytes) -> None:
    """A program of a container: one function by its name, one by its offset."""
    for symbol, offset, nothrow in (("main", None, False), ("serve", None, True), (None, 0x1000, True)):
        with suppress(ProbeError):
            found = function_offset(_written(data), symbol, offset, nothrow)
            require(0 <= found < len(data), "a probe beyond the end of the file")


def cgroup(data: bytes) -> None:
    """/proc/PID/cgroup, where a container may have chosen the names: some container, whatever it says."""
    found = identify(parse_cgroup(data.decode("utf-8", "surrogateescape")))
    require(found.name.isprintable(), "a name moves the cursor")


TARGETS: Final = {
    "elf": Target("ELF libraries", elf),
    "elf_function": Target("ELF programs", elf_function),
    "cgroup": Target("names of cgroups", cgroup, 4096),
}
