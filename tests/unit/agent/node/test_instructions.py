# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the kernel does with a function's first instruction. test_entries.py in tests/kernel asks a kernel the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import binary, sampled_from

from agent.node.elf import Extent
from agent.node.instructions import AT_ENTRY, EntryInstruction, ProbePlace, entry, may_become_a_call, place, places
from gpuwarden.doctor import cost_lines, probe_lines

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


# How exports of NVIDIA's drivers begin: 470 to 555, 580, 595.
CHECKED = "81 3d d6 7b 87 01 00 ba 1c 32"  # cmpl $0x321cba00,state(%rip)
DRIVER_555 = f"{CHECKED} 74 0c ff 25 f6 04 78 01 66 0f 1f 44 00 00 b8 04 00 00 00 c3"
DRIVER_580 = "55 48 89 e5 41 57"
DRIVER_595 = f"{CHECKED} 74 20 55 48 89 e5"
SKIPPED = {
    "endbr64": "f3 0f 1e fa",
    "nopl": "0f 1f 44 00 00",
    "nopl rip": "0f 1f 05 01 02 03 04",
    "nopl far": "0f 1f 80 01 02 03 04",
    "cs nopw": "66 2e 0f 1f 84 00 01 02 03 04",
    "cmpb": "80 3d 01 02 03 04 05",
    "cmpl byte": "83 3d 01 02 03 04 05",
    "cmpq byte": "48 83 3d 01 02 03 04 05",
    "cmpq": "48 81 3d 01 02 03 04 05 06 07 08",
    "cmpw": "66 81 3d 01 02 03 04 05 06",
    "testb": "f6 05 01 02 03 04 05",
    "testl": "f7 05 01 02 03 04 05 06 07 08",
    "testw": "66 f7 05 01 02 03 04 05 06",
    "test al": "a8 01",
    "test eax": "a9 01 02 03 04",
    "test dl": "f6 c2 01",
    "test r8b": "41 f6 c0 01",
    "test r8d": "41 f7 c0 01 02 03 04",
}
STAYS = {
    "sub": "48 83 ec 08",
    "mov": "48 89 f8",
    "addl to memory": "81 05 01 02 03 04 05 06 07 08",
    "orb to memory": "80 0d 01 02 03 04 05",
    "notl of memory": "f7 15 01 02 03 04",
    "cmp through a register": "81 3f 00 ba 1c 32",
    "vector": "c5 f8 77",
    "return": "c3",
    "indirect jump": "ff 25 01 02 03 04",
    "trap": "cc",
}


def placed(code: str, kernel: tuple[int, int] = OLD) -> int:
    return place(bytes.fromhex(code), kernel, "x86_64").distance


@pytest.mark.parametrize(("code", "distance"), [(DRIVER_555, 10), (DRIVER_580, 0), (DRIVER_595, 10)])
def test_a_probe_stands_on_the_first_emulated_instruction_of_each_driver(code: str, distance: int) -> None:
    assert place(bytes.fromhex(code), OLD, "x86_64") == (distance, EntryInstruction.EMULATED)
    assert place(bytes.fromhex(code), NEW, "x86_64") == (distance, EntryInstruction.EMULATED)


@pytest.mark.parametrize("code", SKIPPED.values(), ids=SKIPPED)
def test_what_only_sets_flags_is_skipped(code: str) -> None:
    assert placed(f"{code} 55") == len(bytes.fromhex(code))


@pytest.mark.parametrize("code", STAYS.values(), ids=STAYS)
def test_what_does_more_or_is_unknown_keeps_the_probe_at_the_entry(code: str) -> None:
    assert placed(f"{code} 55") == 0
    assert placed(f"f3 0f 1e fa {code} 55") == 0, "also behind one that is skipped"


def test_a_place_is_near_in_the_function_and_on_x86_only() -> None:
    assert placed(f"{'f3 0f 1e fa ' * 3} 55") == 12
    assert placed(f"{'f3 0f 1e fa ' * 4} 55") == 0
    assert placed(CHECKED) == 0, "the code ends"
    assert placed("") == 0
    assert place(bytes.fromhex(DRIVER_555), NEW, "aarch64") == (0, None)


@given(code=binary(max_size=40), kernel=sampled_from([OLD, NEW]))
def test_whatever_the_bytes_a_place_is_the_entry_or_emulated_and_inside(code: bytes, kernel: tuple[int, int]) -> None:
    distance, instruction = place(code, kernel, "x86_64")
    assert instruction is entry(code[distance:], kernel, "x86_64")
    assert distance == 0 or (instruction is EntryInstruction.EMULATED and distance < min(16, len(code)))


def test_a_place_is_before_the_functions_end_and_before_the_next_function(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(bytes.fromhex(f"{DRIVER_555} 66 90") * 4)
    functions = {0: 30, 32: 10, 64: 0, 74: 4, 96: 0, 128: 9}
    found = places(str(file), [Extent(offset, size) for offset, size in functions.items()])
    if found[0].instruction is None:
        pytest.skip("not an x86-64 machine")
    assert {offset: at.distance for offset, at in found.items()} == {0: 10, 32: 0, 64: 0, 74: 0, 96: 10, 128: 0}


def test_the_doctor_says_where_probes_stand_and_which_are_expensive_or_not_seen() -> None:
    e, s, r = (ProbePlace(0, kind) for kind in EntryInstruction)
    (line,) = cost_lines({"a": e, "b": ProbePlace(10, EntryInstruction.EMULATED), "c": e})
    assert "3 of 3 probes are cheap" in line
    assert line.endswith("so many bytes into their functions: +0 (2), +10 (1)")
    first, second, third = cost_lines({"a": e, "b": s, "c": s, "d": r})
    assert "1 of 4 probes" in first
    assert second.endswith("single-steps their instruction: b, c")
    assert third.endswith("not seen: d")
    assert not list(cost_lines({}))
    assert not list(cost_lines({"a": AT_ENTRY}))


def test_the_doctor_lists_each_probed_function_with_its_place_and_how_it_is_attached() -> None:
    emulated, stepped, _ = EntryInstruction
    of = {"cuLaunchKernel": ProbePlace(10, emulated), "cuMemAlloc_v2": ProbePlace(0, stepped), "cuMemFree": AT_ENTRY}
    head, *lines = probe_lines(of, multi=True)
    assert "attached together, by uprobe_multi" in head
    assert [line.split() for line in lines] == [
        ["cuLaunchKernel", "launch", "entry", "+10", "emulated"],
        ["cuMemAlloc_v2", "alloc", "entry,", "return", "+0", "single-stepped"],
        ["cuMemFree", "free", "entry,", "return", "+0", "unknown"],
    ]
    assert "each attached by a perf event of its own" in next(probe_lines(of, multi=False))
    assert not list(probe_lines({}, multi=True))


FIVE_BYTES = ("0f 1f 44 00 00", "66 0f 1f 40 00", "66 66 0f 1f 00", "66 66 66 66 90")
OTHER_NOPS = (
    "90",
    "66 90",
    "0f 1f 00",
    "0f 1f 40 00",
    "66 0f 1f 44 00 00",
    "0f 1f 80 00 00 00 00",
    "f3 0f 1e fa",
    "55",
)


@pytest.mark.parametrize("code", [*FIVE_BYTES, *OTHER_NOPS])
def test_the_kernel_may_make_a_call_of_a_nop_of_five_bytes_alone(code: str) -> None:
    following = bytes.fromhex("c3 90 90 90 90 90 90 90")
    assert may_become_a_call(bytes.fromhex(code) + following) == (code in FIVE_BYTES)
