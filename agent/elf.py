# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where a shared library's functions are: dynamic symbol → offset in the file, as a uprobe wants it.

The file may be a container's, and made to keep us busy (a million sections, names without an end, sections that name
each other) or to lead us out of it: what is read of it is bounded, in bytes, in parts and in steps, no offset lies
beyond its end, and whatever is wrong with it is a ProbeError. It may be cut or written over while it is read: it is
never mapped, so that costs an error and no signal.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

from agent.errors import ProbeError

_LARGEST_BYTES = 1 << 30
_MOST_READ_BYTES, _MOST_READS = 64 << 20, 50_000
_MOST_SECTIONS, _MOST_SEGMENTS = 4096, 512  # of a libcuda: 40 and 10
_MOST_SYMBOLS = 100_000  # of a libcuda: 3,000
_LONGEST_NAME = 1024
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_FUNCTION = 2  # STT_FUNC


class Bounded(io.FileIO):
    """A file of which only so much is read: a path, or a descriptor, which stays open."""

    def __init__(self, file: str | int) -> None:
        super().__init__(file, closefd=isinstance(file, str))
        self._bytes, self._reads = _MOST_READ_BYTES, _MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads -= 1
        self._bytes -= _MOST_READ_BYTES if size is None or size < 0 else size
        if self._reads < 0 or self._bytes < 0:
            raise ProbeError("it has more to read than any libcuda")
        return super().read(size) or b""

    def at(self, offset: int, size: int) -> bytes:
        """So many bytes from there; fewer where the file ends."""
        self.seek(offset)
        return self.read(size)

    def size_bytes(self) -> int:
        """As it is now."""
        return os.fstat(self.fileno()).st_size


def parsed(stream: Bounded) -> ELFFile:
    """The headers of a program of this kind of machine. ProbeError, and whatever elftools raises."""
    elf = ELFFile(stream)
    if elf.elfclass != 64 or not elf.little_endian:
        raise ProbeError("it is of another kind of machine")
    sections, segments = elf.num_sections(), elf.num_segments()
    if sections > _MOST_SECTIONS or segments > _MOST_SEGMENTS:
        raise ProbeError(f"it has more to read than any libcuda: {sections} sections, {segments} segments")
    return elf


def exported_functions(file: str | int, prefix: str) -> dict[str, int]:
    """File offsets of the functions so named that the library has. ProbeError when it is no readable ELF library."""
    with Bounded(file) as stream:
        size = stream.size_bytes()
        if size > _LARGEST_BYTES:
            raise ProbeError("it is larger than any libcuda: not probed")
        try:
            elf = parsed(stream)
            addresses = dict(_addresses(elf, stream, prefix.encode()))
            segments: list[Any] = [s.header for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
        except ProbeError as error:
            raise ProbeError(f"not probed: {error}") from error
        except Exception as error:  # the parser asserts, and runs off the ends of what it reads
            raise ProbeError(f"it is not an ELF library that can be probed: {error!r:.200}") from error
    found = ((name, _file_offset(segments, at)) for name, at in addresses.items())
    return {name: offset for name, offset in found if offset is not None and offset < size}


def _addresses(elf: ELFFile, stream: Bounded, prefix: bytes) -> Iterator[tuple[str, int]]:
    """By name; read by us, as elftools would take a read for each."""
    section = elf.get_section_by_name(".dynsym")
    if section is None:
        return
    count = section["sh_size"] // _SYMBOL.size
    if count > _MOST_SYMBOLS:
        raise ProbeError(f"it has more to read than any libcuda: {count} symbols")
    strings = elf.get_section(section["sh_link"]).header
    names = stream.at(strings["sh_offset"], strings["sh_size"])
    symbols = stream.at(section["sh_offset"], count * _SYMBOL.size)
    for name, info, _, defined, value, _ in _SYMBOL.iter_unpack(symbols[: len(symbols) // _SYMBOL.size * _SYMBOL.size]):
        if info & 0xF == _FUNCTION and defined and names.startswith(prefix, name):
            end = names.find(b"\0", name, name + _LONGEST_NAME)
            if end < 0:
                raise ProbeError("a name in it has no end")
            yield names[name:end].decode("ascii", "backslashreplace"), value


def _file_offset(segments: list[Any], address: int) -> int | None:
    for segment in segments:
        if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
            return int(address - segment["p_vaddr"] + segment["p_offset"])
    return None
