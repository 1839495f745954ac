# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Return instructions in a library: where a denied call goes on instead of running.

Any in the same executable segment will do, for it is reached by a jump: on x86-64 even a byte inside of another
instruction, as long as no probe may ever stand on it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping

from agent.elf import Bounded, parsed
from agent.errors import ProbeError

_INSTRUCTIONS = {"x86_64": (b"\xc3", 1), "aarch64": (b"\xc0\x03\x5f\xd6", 4)}  # bytes, alignment
_FARTHEST_BYTES = 1 << 16
_EXECUTABLE = 1


def returns(
    file: str | int, functions: Collection[int], probed: Collection[int], machine: str = platform.machine()
) -> Mapping[int, int]:
    """File offset of a function → bytes from it to a return instruction. Functions without one near are left out."""
    if machine not in _INSTRUCTIONS:
        return {}
    code, alignment = _INSTRUCTIONS[machine]
    taken = set(probed)
    found = {}
    with Bounded(file) as stream:
        segments = _executable(stream)
        for function in functions:
            end = next((end for start, end in segments if start <= function < end), function)
            text = os.pread(stream.fileno(), min(_FARTHEST_BYTES, end - function), function)
            distance = _first(text, code, alignment, {place - function for place in taken})
            if distance is not None:
                found[function] = distance
    return found


def _first(text: bytes, code: bytes, alignment: int, taken: Collection[int]) -> int | None:
    at = text.find(code)
    while at >= 0:
        if at % alignment == 0 and at not in taken:
            return at
        at = text.find(code, at + 1)
    return None


def _executable(stream: Bounded) -> list[tuple[int, int]]:
    """File ranges."""
    try:
        headers = [s.header for s in parsed(stream).iter_segments() if s.header.p_type == "PT_LOAD"]
    except Exception as error:  # as in agent.elf: it asserts
        raise ProbeError(f"it is not an ELF library that can be probed: {error!r:.200}") from error
    return [(h.p_offset, h.p_offset + h.p_filesz) for h in headers if h.p_flags & _EXECUTABLE]
