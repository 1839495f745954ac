# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Instructions under probes: the cost at a function's entry, and return instructions that a denied call jumps to.

A probe is a breakpoint in the instruction's place. If the kernel can emulate the instruction, the program goes on at
once; else the kernel single-steps a copy of it, which is a second trap, expensive in a virtual machine. Some
instructions can have no probe at all; the kernel reports that only while a process has the file mapped, so a probe that
was attached before is silent. Source: arch/x86/kernel/uprobes.c of Linux 5.15 to 6.18.

A denied call jumps to any return instruction in the same executable segment: on x86-64 even a byte inside of another
instruction will do, as long as no probe is ever placed on it.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Final

from agent.core.errors import ProbeError
from agent.node.elf import Bounded, parsed
from agent.node.preflight import kernel_version

LONGEST_BYTES: Final = 15  # of an x86 instruction


class EntryInstruction(StrEnum):
    """How the kernel executes the instruction under a probe."""

    EMULATED = "emulated"
    SINGLE_STEPPED = "single-stepped"
    REFUSED = "refused"


_PREFIXES: Final = frozenset(b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3")
_BAD_PREFIXES: Final = frozenset(b"\x26\x2e\x36\x3e\xf0")  # segments but fs and gs, and lock
_WIDER: Final = 0x66  # the size of the operand
_REPEAT: Final = 0xF3
_VECTOR: Final = frozenset(b"\x62\xc4\xc5")  # EVEX and VEX: what follows is coded otherwise, and no function begins so

_REFUSED: Final = frozenset(
    b"\x06\x07\x0e\x16\x17\x1e\x1f\x27\x2f\x37\x3f\x60\x61\x6c\x6d\x6e\x6f\x82\x9a\xcc\xcd\xce\xcf\xd4\xd5\xd6"
    b"\xe4\xe5\xe6\xe7\xea\xec\xed\xee\xef\xf1\xf4\xfa\xfb"
)

_CALL, _JUMP_FAR, _JUMP_NEAR, _NOP, _TWO_BYTES, _LONG_NOP, _MOVE_TO_SEGMENT = 0xE8, 0xE9, 0xEB, 0x90, 0x0F, 0x1F, 0x8E
_STACK_SEGMENT: Final = 2
_EXTENDS: Final = 0x41  # the REX prefix of push %r8 to push %r15
_LONG_NOP_SINCE: Final = (6, 18)  # of Linux: emulated


def entry(code: bytes, kernel: tuple[int, int], machine: str) -> EntryInstruction | None:
    """How this kernel executes the instruction that these bytes begin with.

    None: unknown, as on other architectures, for too few bytes, and for vector instructions.
    """
    if machine != "x86_64":
        return None
    prefixes = code[: next((at for at, byte in enumerate(code) if byte not in _PREFIXES), len(code))]
    rest = code[len(prefixes) :]
    rex = rest[0] if rest and rest[0] & 0xF0 == 0x40 else 0
    opcode = rest[1:] if rex else rest
    if not opcode:
        return None
    opcode += bytes(2)  # what decides is in three bytes at most, and an instruction may be the file's last
    if opcode[0] in _VECTOR:
        return None
    if not _BAD_PREFIXES.isdisjoint(prefixes) or opcode[0] in _REFUSED or _hides_traps(opcode):
        return EntryInstruction.REFUSED
    if _is_branch(opcode):
        return EntryInstruction.REFUSED if _WIDER in prefixes else EntryInstruction.EMULATED
    if _is_nop(prefixes, rex, opcode, kernel):
        return EntryInstruction.EMULATED
    return EntryInstruction.EMULATED if _is_push(prefixes, rex, opcode) else EntryInstruction.SINGLE_STEPPED


def entries(file: str | int, places: Mapping[str, int]) -> dict[str, EntryInstruction | None]:
    """`entry` of the functions at these offsets of a file, for the running kernel. ProbeError, OSError."""
    kernel, machine = kernel_version(platform.release()), platform.machine()
    with Bounded(file) as stream:
        return {name: entry(stream.at(offset, LONGEST_BYTES), kernel, machine) for name, offset in places.items()}


def _is_push(prefixes: bytes, rex: int, opcode: bytes) -> bool:
    """A push of one register, in the forms that compilers emit."""
    return opcode[0] & 0xF8 == 0x50 and not prefixes and rex in (0, _EXTENDS)


def _is_branch(opcode: bytes) -> bool:
    """Relative jumps and calls, and conditional jumps."""
    if opcode[0] == _TWO_BYTES:
        return opcode[1] & 0xF0 == 0x80
    return opcode[0] in (_CALL, _JUMP_FAR, _JUMP_NEAR) or opcode[0] & 0xF0 == 0x70


def _is_nop(prefixes: bytes, rex: int, opcode: bytes, kernel: tuple[int, int]) -> bool:
    if opcode[0] == _NOP:
        return not rex & 1 and _REPEAT not in prefixes  # else it is xchg, or pause
    is_long = opcode[0] == _TWO_BYTES and opcode[1] == _LONG_NOP and not opcode[2] & 0x38
    return is_long and kernel >= _LONG_NOP_SINCE


def _hides_traps(opcode: bytes) -> bool:
    """A move to the stack segment: the processor delays traps after it."""
    return opcode[0] == _MOVE_TO_SEGMENT and opcode[1] >> 3 & 7 == _STACK_SEGMENT


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
    """The file ranges of executable segments."""
    try:
        headers = [s.header for s in parsed(stream).iter_segments() if s.header.p_type == "PT_LOAD"]
    except Exception as error:  # as in agent.node.elf: it asserts
        raise ProbeError(f"it is not an ELF library that can be probed: {error!r:.200}") from error
    return [(h.p_offset, h.p_offset + h.p_filesz) for h in headers if h.p_flags & _EXECUTABLE]
