# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where a shared library's functions are: dynamic symbol → offset in the file, as a uprobe wants it.

The file may be a container's, and made to keep us busy (a million sections, names without an end): what is read of it
is bounded, in bytes and in steps, and whatever is wrong with it is a ProbeError.
"""

from __future__ import annotations

import io
import os
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from agent.errors import ProbeError

_LARGEST_BYTES = 1 << 30
_MOST_READ_BYTES, _MOST_READS = 64 << 20, 300_000  # of a libcuda: 2 MiB in 30,000


class Bounded(io.FileIO):
    """A file of which only so much is read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._bytes, self._reads = _MOST_READ_BYTES, _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads -= 1
        self._bytes -= _MOST_READ_BYTES if size is None or size < 0 else size
        if self._reads < 0 or self._bytes < 0:
            raise ProbeError("it has more to read than any libcuda")
        return super().read(size) or b""


def exported_functions(path: str, prefix: str) -> dict[str, int]:
    """File offsets of the functions so named that the library has. ProbeError when it is no readable ELF library."""
    with Bounded(path) as stream:
        if os.fstat(stream.fileno()).st_size > _LARGEST_BYTES:
            raise ProbeError(f"{path} is larger than any libcuda: not probed")
        try:
            elf = ELFFile(stream)
            addresses = _addresses(elf, prefix)
            segments: list[Any] = [s.header for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
        except Exception as error:  # the parser asserts, and runs off the ends of what it reads
            raise ProbeError(f"{path} is not an ELF library that can be probed: {error}") from error
    return {name: offset for name, at in addresses.items() if (offset := _file_offset(segments, at)) is not None}


def _addresses(elf: ELFFile, prefix: str) -> dict[str, int]:
    section = elf.get_section_by_name(".dynsym")
    if not isinstance(section, SymbolTableSection):
        return {}
    return {
        symbol.name: symbol["st_value"]
        for symbol in section.iter_symbols()
        if symbol.name.startswith(prefix)
        and symbol["st_info"]["type"] == "STT_FUNC"
        and symbol["st_shndx"] != "SHN_UNDEF"
    }


def _file_offset(segments: list[Any], address: int) -> int | None:
    for segment in segments:
        if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
            return int(address - segment["p_vaddr"] + segment["p_offset"])
    return None
