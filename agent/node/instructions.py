# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Instructions under probes: where in a function a probe is cheap, and return instructions that denied calls jump to.

A probe is a breakpoint in the instruction's place. If the kernel can emulate the instruction, the program goes on at
once; else the kernel single-steps a copy of it, which is a second trap, expensive in a virtual machine: 10 µs a call
instead of 0.7. Some instructions can have no probe at all; the kernel reports that only while a process has the file
mapped, so a probe that was attached before is silent. Source: arch/x86/kernel/uprobes.c of Linux 5.15 to 6.18.

NVIDIA's drivers 470 to 555, and 595, begin each export with a comparison that is single-stepped, and a conditional jump
that is emulated: `cmpl $imm, state(%rip); je …`. So a probe may stand behind instructions that only read memory and set
flags: registers, stack and return address are there what they are at the function's entry.

A denied call jumps to any return instruction in the same executable segment: on x86-64 even a byte inside of another
instruction will do, as long as no probe is ever placed on it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from agent.core.errors import ProbeError
from agent.node.elf import Bounded, Extent, parsed
from agent.node.preflight import kernel_version

LONGEST_BYTES: Final = 15  # of an x86 instruction


class EntryInstruction(StrEnum):
    """How the kernel executes the instruction under a probe."""

    EMULATED = "emulated"
    SINGLE_STEPPED = "single-stepped"
    REFUSED = "refused"


class ProbePlace(NamedTuple):
    """Bytes from a function's first one to its probes, and the instruction there; None: unknown."""

    distance: int
    instruction: EntryInstruction | None


AT_ENTRY: Final = ProbePlace(0, None)

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

_FARTHEST_PLACE_BYTES: Final = 16
# Neither registers but the flags, nor stack, nor memory are changed, and no jump is taken: endbr64, nops, comparisons
# of memory at a fixed address with a number, tests against a number.
_ONLY_SETS_FLAGS: Final = re.compile(
    rb"\xf3\x0f\x1e\xfa"  # endbr64
    rb"|[\x66\x2e]*\x90|[\x66\x2e]*\x0f\x1f(?:"  # nops, by the form of their address
    rb"[\x00-\x03\x06\x07\xc0-\xc7]|\x04.|\x05.{4}|[\x40-\x43\x45-\x47].|\x44.{2}|[\x80-\x83\x85-\x87].{4}|\x84.{5})"
    rb"|\x48?(?:\x80\x3d.{5}|\x83\x3d.{5}|\x81\x3d.{8})|\x66(?:\x83\x3d.{5}|\x81\x3d.{6})"  # cmp $imm, at(%rip)
    rb"|\x48?(?:\xf6\x05.{5}|\xf7\x05.{8})|\x66\xf7\x05.{6}"  # test $imm, at(%rip)
    rb"|\xa8.|\x48?\xa9.{4}|[\x40\x41]?\xf6[\xc0-\xc7].|[\x41\x48\x49]?\xf7[\xc0-\xc7].{4}",  # test $imm, register
    re.DOTALL,
)


_NOP_5: Final = re.compile(
    rb"\x0f\x1f\x44..|[\x66\x2e]\x0f\x1f[\x40-\x43\x45-\x47]."
    rb"|[\x66\x2e]\x0f\x1f\x04.|[\x66\x2e]{2}\x0f\x1f[\x00-\x03\x06\x07\xc0-\xc7]|[\x66\x2e]{4}\x90",
    re.DOTALL,
)


def may_become_a_call(code: bytes) -> bool:
    """Whether the instruction is a nop of five bytes: from Linux 6.18 on a probe on it ends as a system call."""
    return _NOP_5.match(code) is not None


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


def entry_here(code: bytes) -> EntryInstruction | None:
    """`entry` on the running kernel."""
    return entry(code, kernel_version(platform.release()), platform.machine())


def place(code: bytes, kernel: tuple[int, int], machine: str) -> ProbePlace:
    """The cheap place in the function that these bytes begin; its entry where none is. `code`: no byte of another."""
    at_entry = ProbePlace(0, entry(code, kernel, machine))
    at = 0
    while machine == "x86_64" and at < min(_FARTHEST_PLACE_BYTES, len(code)):
        if entry(code[at:], kernel, machine) is EntryInstruction.EMULATED:
            return ProbePlace(at, EntryInstruction.EMULATED)
        match = _ONLY_SETS_FLAGS.match(code, at)
        if match is None:
            break
        at = match.end()
    return at_entry


def places(file: str | int, functions: Iterable[Extent]) -> dict[int, ProbePlace]:
    """`place` of functions of a file by their offset, for the running kernel. ProbeError, OSError.

    A place lies before the function's end and before the next of these functions; those of unknown size have one at
    their entry, or behind it by instructions alone.
    """
    most = _FARTHEST_PLACE_BYTES + LONGEST_BYTES
    sizes = {function.offset: function.size_bytes or most for function in functions}
    starts = sorted(sizes)
    with Bounded(file) as stream:
        code = {
            start: stream.at(start, min(most, sizes[start], following - start))
            for start, following in zip(starts, [*starts[1:], sys.maxsize], strict=True)
        }
    kernel, machine = kernel_version(platform.release()), platform.machine()
    return {start: place(text, kernel, machine) for start, text in code.items()}


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
    """File offset of a place in a function → bytes from it to a return instruction; left out where none is near.

    `functions`: the places of the probes that deny. `probed`: of all probes.
    """
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
