# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where a shared library's functions are: dynamic symbol → offset in the file, as a uprobe wants it."""

from __future__ import annotations

import os
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from agent.errors import ProbeError

_LARGEST_BYTES = 1 << 30


def exported_functions(path: str, prefix: str) -> dict[str, int]:
    """File offsets of the functions so named that the library has. ProbeError when it is no readable ELF library."""
    with open(path, "rb") as stream:
        if os.fstat(stream.fileno()).st_size > _LARGEST_BYTES:
            raise ProbeError(f"{path} is larger than any libcuda: not probed")
        try:
            elf = ELFFile(stream)
            addresses = _addresses(elf, prefix)
            segments: list[Any] = [s.header for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
        except (ELFError, ValueError, KeyError, OverflowError, UnicodeDecodeError) as error:
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
