# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where a shared library's functions are: dynamic symbol → offset in the file, as a uprobe wants it."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

from agent.errors import ProbeError

_LARGEST_BYTES = 1 << 30


def function_offsets(path: str, names: Collection[str]) -> dict[str, int]:
    """File offsets of those `names` that the library defines. ProbeError when it is no readable ELF library."""
    descriptor = _open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        try:
            elf = ELFFile(stream)
            addresses = _addresses(elf, names)
            segments = [s.header for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
        except (ELFError, ValueError, KeyError, OverflowError, UnicodeDecodeError) as error:
            raise ProbeError(f"{path} is not an ELF library that can be probed: {error}") from error
    return {name: offset for name, at in addresses.items() if (offset := _file_offset(segments, at)) is not None}


def _open_regular(path: str) -> int:
    """Libraries come out of containers: no FIFO may block us, no device may be opened twice, no size is trusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ProbeError(f"cannot open {path}: {error.strerror}") from error
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > _LARGEST_BYTES:
        os.close(descriptor)
        raise ProbeError(f"{path} is not a regular file of a plausible size: not probed")
    return descriptor


def _addresses(elf: ELFFile, names: Collection[str]) -> dict[str, int]:
    section = elf.get_section_by_name(".dynsym")
    if section is None:
        return {}
    wanted = set(names)
    return {
        symbol.name: symbol["st_value"]
        for symbol in section.iter_symbols()
        if symbol.name in wanted and symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_shndx"] != "SHN_UNDEF"
    }


def _file_offset(segments: list[dict[str, int]], address: int) -> int | None:
    for segment in segments:
        if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
            return address - segment["p_vaddr"] + segment["p_offset"]
    return None
