# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where a shared library's functions are: dynamic symbol → offset in the file, as a uprobe wants it.

The file may be a container's, and hostile: made to use up time (a million sections, overlapping names, sections that
refer to each other) or with offsets beyond its end. Reading is bounded in bytes, parts, steps and CPU time, no offset
that is returned lies beyond the end, and every defect is a ProbeError. The file may be truncated or overwritten during
the read: it is never mapped, so that is an error and no SIGBUS.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from elftools.elf.elffile import ELFFile

from agent.core.errors import ProbeError

_LARGEST_BYTES = 1 << 30
_MOST_READ_BYTES, _MOST_READS = 16 << 20, 50_000
_MOST_CPU_NS = 500_000_000  # a libcuda takes a twentieth of it; the observing thread waits
_MOST_SECTIONS, _MOST_SEGMENTS = 4096, 512  # of a libcuda: 40 and 10
_MOST_SYMBOLS = 100_000  # of a libcuda: 3,000
_MOST_FUNCTIONS = 10_000  # with the wanted prefix; of a libcuda: 1,000
_LONGEST_NAME = 128  # of a libcuda: 50
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_FUNCTION = 2  # STT_FUNC
_MORE = "it has more to read than any libcuda"


class Bounded(io.FileIO):
    """A file of which only so much is read, for so long: a path, or a descriptor, which stays open."""

    def __init__(self, file: str | int) -> None:
        super().__init__(file, closefd=isinstance(file, str))
        self._bytes, self._reads = _MOST_READ_BYTES, _MOST_READS
        self._ends_ns = time.thread_time_ns() + _MOST_CPU_NS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads -= 1
        self._bytes -= _MOST_READ_BYTES if size is None or size < 0 else size
        if self._reads < 0 or self._bytes < 0:
            raise ProbeError(_MORE)
        self.require_time()
        return super().read(size) or b""

    def at(self, offset: int, size: int) -> bytes:
        """So many bytes from there; fewer where the file ends."""
        self.seek(offset)
        return self.read(size)

    def require_time(self) -> None:
        """ProbeError when this thread has worked on it for longer than any library needs."""
        if time.thread_time_ns() > self._ends_ns:
            raise ProbeError(f"{_MORE}: {_MOST_CPU_NS // 1_000_000} ms were not enough")

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
        raise ProbeError(f"{_MORE}: {sections} sections, {segments} segments")
    return elf


class Extent(NamedTuple):
    """Where a function is in a file. `size_bytes`: as the symbol says; 0 where it does not."""

    offset: int
    size_bytes: int


def exported_functions(file: str | int, prefix: str) -> dict[str, int]:
    """File offsets of the functions so named that the library has. ProbeError when it is no readable ELF library."""
    return {name: extent.offset for name, extent in exported_extents(file, prefix).items()}


def exported_extents(file: str | int, prefix: str) -> dict[str, Extent]:
    """`exported_functions` with their sizes."""
    with Bounded(file) as stream:
        size = stream.size_bytes()
        if size > _LARGEST_BYTES:
            raise ProbeError("it is larger than any libcuda: not probed")
        try:
            elf = parsed(stream)
            addresses = list(_addresses(elf, stream, prefix.encode()))
            segments = list(_segments(elf))
            found = {}
            for name, address, bytes_of_it in addresses:
                stream.require_time()
                offset = _file_offset(segments, address)
                if offset is not None and offset < size:
                    found[name] = Extent(offset, bytes_of_it)
        except ProbeError as error:
            raise ProbeError(f"not probed: {error}") from error
        except Exception as error:  # the parser asserts, and runs off the ends of what it reads
            raise ProbeError(f"it is not an ELF library that can be probed: {error!r:.200}") from error
    return found


def _addresses(elf: ELFFile, stream: Bounded, prefix: bytes) -> Iterator[tuple[str, int, int]]:
    """Names, addresses and sizes; read by us, as elftools would take a read for each."""
    section = elf.get_section_by_name(".dynsym")
    if section is None:
        return
    count = section["sh_size"] // _SYMBOL.size
    if count > _MOST_SYMBOLS:
        raise ProbeError(f"{_MORE}: {count} symbols")
    strings = elf.get_section(section["sh_link"]).header
    names = stream.at(strings["sh_offset"], strings["sh_size"])
    symbols = stream.at(section["sh_offset"], count * _SYMBOL.size)
    left = _MOST_FUNCTIONS
    whole = len(symbols) // _SYMBOL.size * _SYMBOL.size
    for name, info, _, defined, value, size in _SYMBOL.iter_unpack(symbols[:whole]):
        if info & 0xF == _FUNCTION and defined and names.startswith(prefix, name):
            left -= 1
            if left < 0:
                raise ProbeError(f"{_MORE}: {_MOST_FUNCTIONS} functions {prefix.decode()}*")
            stream.require_time()
            end = names.find(b"\0", name, name + _LONGEST_NAME + 1)
            if end >= 0 and (text := names[name:end]).isascii():  # no other can be one of ours
                yield text.decode("ascii"), value, size


def _segments(elf: ELFFile) -> Iterator[tuple[int, int, int]]:
    """Address, size and place in the file of what is loaded of it."""
    for segment in elf.iter_segments():
        header = segment.header
        if header.p_type == "PT_LOAD":
            yield header.p_vaddr, header.p_filesz, header.p_offset


def _file_offset(segments: list[tuple[int, int, int]], address: int) -> int | None:
    for start, size, offset in segments:
        if start <= address < start + size:
            return address - start + offset
    return None
