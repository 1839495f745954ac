# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether a function of a container's program may have a return probe, and its offset in the file.

A return probe replaces the return address on the stack. Where there is none (inside a function, at a program's entry),
or where other code reads it (exception unwinding, Go's scheduler, setjmp), that breaks the program. So an offset that
cannot be shown to be a function's start is refused. The file may be hostile: reading is bounded, and every defect is a
ProbeError.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

from agent.core.errors import ProbeError
from agent.node.elf import Bounded, parsed

_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 512 << 20  # of symbols and their names together
_MOST_UNWOUND_BYTES = 64 << 20  # 8 million functions
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_FUNCTION = 2  # STT_FUNC
_EXECUTABLE = 1  # PF_X
_TABLES = ((".symtab", ".strtab"), (".dynsym", ".dynstr"))
_GO_SECTIONS = (".go.buildinfo", ".gopclntab", ".note.go.buildid")
_UNWINDERS = (b"_Unwind_RaiseException", b"__cxa_throw", b"__gxx_personality_v0", b"rust_eh_personality")
_RETURN_TWICE = {"setjmp", "_setjmp", "sigsetjmp", "__sigsetjmp", "vfork", "__vfork", "getcontext", "swapcontext"}
_NO_CALLER = {"_start", "_dl_start"}
_HEADER_ENCODING = b"\x03\x3b"  # of .eh_frame_hdr: count as udata4, a table of pairs of sdata4 from its own start
_PAIR = struct.Struct("<ii")


def function_offset(file: str | int, symbol: str | None, offset: int | None, nothrow: bool) -> int:
    """The function's offset in the file. ProbeError, with what to write instead, where it must not be probed.

    `nothrow`: the policy asserts that no exception leaves it.
    """
    try:
        with Bounded(file) as stream:
            program = _File(stream)
            program.refuse_where_stacks_are_unwound(nothrow)
            found = program.offset_of(symbol) if symbol is not None else program.checked(offset or 0)
            if found >= stream.size_bytes():
                raise ProbeError("the function is beyond the end of the file; check slo.binary")
            return found
    except ProbeError:
        raise
    except OSError as error:
        raise ProbeError(f"it cannot be read ({error.strerror})") from error
    except Exception as error:  # the parser asserts, and runs off the ends of what it reads
        raise ProbeError(f"it is not an ELF program or library ({error!r:.80}); check slo.binary") from error


class _File:
    """One file while it is examined."""

    def __init__(self, stream: Bounded) -> None:
        self._elf = parsed(stream)
        self._stream = stream
        self._sections = {section.name: section.header for section in self._elf.iter_sections()}
        segments = (segment.header for segment in self._elf.iter_segments() if segment.header.p_type == "PT_LOAD")
        self._code: list[Any] = [header for header in segments if header.p_flags & _EXECUTABLE]
        self._left_bytes = _MOST_BYTES

    def refuse_where_stacks_are_unwound(self, nothrow: bool) -> None:
        """Go's always are; those of C++ and Rust by exceptions and panics."""
        if any(name in self._sections for name in _GO_SECTIONS):
            raise ProbeError("it is a Go program, which moves its stacks and would crash; use another signal")
        if nothrow:
            return
        if ".gcc_except_table" in self._sections or any(self._names_any(strings) for _, strings in _TABLES):
            raise ProbeError(
                "an exception or panic that leaves a timed function ends the program, and this one can throw; "
                "choose a function that none leaves and write nothrow: true"
            )

    def offset_of(self, symbol: str) -> int:
        """The offset of the function of that name."""
        if symbol in _RETURN_TWICE or symbol in _NO_CALLER or ".cold" in symbol:
            raise ProbeError(f"{symbol} does not return as functions do; choose another")
        word = symbol.encode()
        for symbols, strings in _TABLES:
            names = set(self._places(strings, word))
            for name, info, _, section, value, _ in self._symbols(symbols) if names else ():
                if name in names and info & 0xF == _FUNCTION and section:
                    return self._in_file(value)
        raise ProbeError(f"it has no function {symbol} (a stripped file has few); check slo.symbol or give slo.offset")

    def checked(self, offset: int) -> int:
        """The offset from the policy, if a function begins there."""
        address = self._address(offset)
        if address == self._elf.header["e_entry"] or address not in self._beginnings(address):
            raise ProbeError(
                f"no function is known to begin at offset {offset:#x}; check slo.offset or give slo.symbol"
            )
        return offset

    def _beginnings(self, address: int) -> set[int]:
        """Those addresses at which a function begins, by the unwind table or the symbols: that one, or none."""
        found = {value for value in self._unwound() if value == address}
        for symbols, _ in _TABLES:
            found.update(
                value
                for _, info, _, _, value, _ in self._symbols(symbols)
                if value == address and info & 0xF == _FUNCTION
            )
        return found

    def _unwound(self) -> Iterator[int]:
        header = self._sections.get(".eh_frame_hdr")
        if header is None:
            return
        if header["sh_size"] > _MOST_UNWOUND_BYTES:
            raise ProbeError("its unwind table is larger than any; give slo.symbol")
        data = b"".join(self._chunks(header))
        if data[:1] != b"\x01" or data[2:4] != _HEADER_ENCODING:
            return
        (count,) = struct.unpack_from("<I", data, 8)
        whole = min(count, (len(data) - 12) // _PAIR.size)
        for at, _ in _PAIR.iter_unpack(memoryview(data)[12 : 12 + whole * _PAIR.size]):
            yield header["sh_addr"] + at

    def _in_file(self, address: int) -> int:
        for segment in self._code:
            if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
                return int(address - segment["p_vaddr"] + segment["p_offset"])
        raise ProbeError("the function is in no code of the file; check slo.symbol")

    def _address(self, offset: int) -> int:
        for segment in self._code:
            if segment["p_offset"] <= offset < segment["p_offset"] + segment["p_filesz"]:
                return int(offset - segment["p_offset"] + segment["p_vaddr"])
        raise ProbeError(f"offset {offset:#x} is in no code of the file; check slo.offset")

    def _symbols(self, name: str) -> Iterator[tuple[int, int, int, int, int, int]]:
        header = self._sections.get(name)
        for chunk in self._chunks(header, _CHUNK_BYTES // _SYMBOL.size * _SYMBOL.size) if header else ():
            yield from _SYMBOL.iter_unpack(chunk[: len(chunk) // _SYMBOL.size * _SYMBOL.size])

    def _names_any(self, strings: str) -> bool:
        """Whether something that unwinds is among the names. One that two chunks share is missed; it is never alone."""
        header = self._sections.get(strings)
        return any(word in chunk for chunk in (self._chunks(header) if header else ()) for word in _UNWINDERS)

    def _places(self, strings: str, word: bytes) -> Iterator[int]:
        """Where in a string table a name stands; also as the end of another, for tables share their ends."""
        header = self._sections.get(strings)
        wanted, before, at = word + b"\0", b"", 0
        for chunk in self._chunks(header) if header else ():
            text = before + chunk
            found = text.find(wanted)
            while found >= 0:
                yield at - len(before) + found
                found = text.find(wanted, found + 1)
            at += len(chunk)
            before = text[-(len(wanted) - 1) :]

    def _chunks(self, header: Any, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
        start, end = header["sh_offset"], header["sh_offset"] + header["sh_size"]
        if header["sh_type"] == "SHT_NOBITS":
            return
        for at in range(start, end, size):
            part = min(size, end - at)
            self._left_bytes -= part
            if self._left_bytes < 0:
                raise ProbeError(f"its symbols are more than {_MOST_BYTES >> 20} MiB; strip it, and give slo.offset")
            data = os.pread(self._stream.fileno(), part, at)
            yield data
            if len(data) < part:
                return
