# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a probe on a function's first instruction costs: whether the kernel emulates that instruction or has to step it.

A probe is a breakpoint in the instruction's place. Where the kernel can do by itself what the instruction does, the
program goes on at once; else it runs a copy of it with the trap flag set, which is a second trap, and a dear one in a
virtual machine. Some instructions can have no probe at all; the kernel says so only while somebody has the file mapped,
so a probe that was attached before is silent. Source: arch/x86/kernel/uprobes.c of Linux 5.15 to 6.18.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from agent.elf import Bounded
from agent.preflight import kernel_version

LONGEST_BYTES: Final = 15  # of an x86 instruction


class Entry(StrEnum):
    """What the kernel does with the instruction under a probe."""

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


def entry(code: bytes, kernel: tuple[int, int], machine: str) -> Entry | None:
    """Of the instruction that these bytes begin with, on this kernel.

    None: not known, for it is another kind of machine, too few bytes, or a vector instruction.
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
        return Entry.REFUSED
    if _is_branch(opcode):
        return Entry.REFUSED if _WIDER in prefixes else Entry.EMULATED
    if _is_nop(prefixes, rex, opcode, kernel):
        return Entry.EMULATED
    return Entry.EMULATED if _is_push(prefixes, rex, opcode) else Entry.SINGLE_STEPPED


def entries(file: str | int, places: Mapping[str, int]) -> dict[str, Entry | None]:
    """Of the functions at these offsets of a file, for the kernel that runs here. ProbeError, OSError."""
    kernel, machine = kernel_version(platform.release()), platform.machine()
    with Bounded(file) as stream:
        return {name: entry(stream.at(offset, LONGEST_BYTES), kernel, machine) for name, offset in places.items()}


def _is_push(prefixes: bytes, rex: int, opcode: bytes) -> bool:
    """Of one register, in its plain forms: those that compilers make."""
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
    """A move to the stack segment: the processor takes no trap right after it."""
    return opcode[0] == _MOVE_TO_SEGMENT and opcode[1] >> 3 & 7 == _STACK_SEGMENT
