# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the kernel does with a function's first instruction. test_entries.py in tests/kernel asks a kernel the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.node.instructions import EntryInstruction, entries, entry
from gpuwarden.doctor import cost_lines

OLD, NEW = (5, 15), (6, 18)
EMULATED = {
    "push %rbp": "55",
    "push %r15": "41 57",
    "nop": "90",
    "xchg %ax,%ax": "66 90",
    "jmp near": "eb 10",
    "jmp": "e9 00 01 00 00",
    "call": "e8 00 01 00 00",
    "jne near": "75 02",
    "je": "0f 84 00 01 00 00",
    "bnd jmp": "f2 e9 00 01 00 00",
}
STEPPED = {
    "endbr64": "f3 0f 1e fa",
    "sub $8,%rsp": "48 83 ec 08",
    "mov %rdi,%rax": "48 89 f8",
    "mov 0x100(%rip),%eax": "8b 05 00 01 00 00",
    "jmp *0x100(%rip)": "ff 25 00 01 00 00",
    "call *%rax": "ff d0",
    "push $5": "6a 05",
    "push 8(%rdi)": "ff 77 08",
    "rex.W push %rbp": "48 55",
    "push %bp": "66 55",
    "mov %fs:0,%rax": "64 48 8b 04 25 00 00 00 00",
    "xchg %r8,%rax": "49 90",
    "pause": "f3 90",
    "ret": "c3",
    "repz ret": "f3 c3",
    "mov %ax,%ds": "8e d8",
}
REFUSED = {
    "int3": "cc",
    "hlt": "f4",
    "int $0x80": "cd 80",
    "in (%dx),%al": "ec",
    "lock incl (%rdi)": "f0 ff 07",
    "notrack jmp *%rax": "3e ff e0",
    "cs nopw": "66 2e 0f 1f 84 00 00 00 00 00",
    "mov %eax,%ss": "8e d0",
    "jmpw": "66 e9 00 01",
    "callw": "66 e8 00 01",
}
LONG_NOPS = {"nopl (%rax)": "0f 1f 00", "nopl 0(%rax,%rax,1)": "0f 1f 44 00 00", "nopw": "66 0f 1f 44 00 00"}


def of(code: str, kernel: tuple[int, int] = NEW, machine: str = "x86_64") -> EntryInstruction | None:
    return entry(bytes.fromhex(code), kernel, machine)


@pytest.mark.parametrize("kernel", [OLD, NEW])
@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        (name, code, expected)
        for expected, table in (
            (EntryInstruction.EMULATED, EMULATED),
            (EntryInstruction.SINGLE_STEPPED, STEPPED),
            (EntryInstruction.REFUSED, REFUSED),
        )
        for name, code in table.items()
    ],
)
def test_an_instruction_is_emulated_stepped_or_refused(
    name: str, code: str, expected: EntryInstruction, kernel: tuple[int, int]
) -> None:
    assert of(code, kernel) is expected, name
    assert of(f"{code} 48 89 f8 c3", kernel) is expected, "what follows it makes no difference"


@pytest.mark.parametrize("code", LONG_NOPS.values(), ids=LONG_NOPS)
def test_long_nops_are_emulated_since_linux_6_18(code: str) -> None:
    assert of(code, NEW) is EntryInstruction.EMULATED
    assert of(code, (6, 17)) is EntryInstruction.SINGLE_STEPPED


def test_vector_instructions_of_other_machines_and_no_instruction_are_unknown() -> None:
    assert of("55", machine="aarch64") is None
    assert of("c5 f8 77") is None
    assert of("") is None
    assert of("66") is None
    assert of("f3 48") is None


def test_functions_are_looked_up_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(bytes.fromhex("55 5d c3 cc 48 89 f8 c3"))
    found = entries(str(file), {"push": 0, "trap": 3, "move": 4, "last": 7, "beyond": 8})
    if found["push"] is None:
        pytest.skip("not an x86-64 machine")
    assert found == {
        "push": EntryInstruction.EMULATED,
        "trap": EntryInstruction.REFUSED,
        "move": EntryInstruction.SINGLE_STEPPED,
        "last": EntryInstruction.SINGLE_STEPPED,
        "beyond": None,
    }


def test_the_doctor_names_functions_that_are_dear_and_those_that_are_not_seen() -> None:
    e, s, r = EntryInstruction.EMULATED, EntryInstruction.SINGLE_STEPPED, EntryInstruction.REFUSED
    (line,) = cost_lines({"a": e, "b": e})
    assert "2 of 2 begin" in line
    first, second, third = cost_lines({"a": e, "b": s, "c": s, "d": r})
    assert "1 of 4 begin" in first
    assert second.endswith("first instruction is single-stepped: b, c")
    assert third.endswith("not seen: d")
    assert not list(cost_lines({}))
