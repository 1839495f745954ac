# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""agent/entries.py says of each instruction what this kernel does when a probe stands on it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.entries import LONGEST_BYTES, Entry, entry
from agent.errors import ProbeError
from agent.libbpf import BpfObject
from agent.preflight import kernel_version
from gpu.conversation import PROGRAMS
from gpu.machine_code import FUNCTIONS, write

_BUILT = Path(__file__).parents[2] / "build" / "bpf"
RET = b"\xc3"
MORE = {
    "push %r15": "41 57 41 5f",
    "rex.W push": "48 55 5d",
    "jne": "75 00",
    "je": "0f 84 00 00 00 00",
    "xchg %ax,%ax": "66 90",
    "mov %fs:0": "64 48 8b 04 25 00 00 00 00",
    "nopl": "0f 1f 00",
    "nopw": "66 0f 1f 44 00 00",
    "int3": "cc",
    "hlt": "f4",
    "lock": "f0 83 0c 24 00",
    "in": "ec",
    "notrack jmp": "3e ff e0",
    "cs nopl": "2e 0f 1f 00",
    "jmpw": "66 e9 00 00",
    "mov %eax,%ss": "8e d0",
}
CODES = {**FUNCTIONS, **{name: bytes.fromhex(code) + RET for name, code in MORE.items()}}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86-64")


@contextmanager
def caller(file: Path, places: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """A program that has the file mapped and calls what it is told to."""
    command = [sys.executable, str(PROGRAMS / "calling.py"), str(file), str(places["loop"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def seen(bpf: BpfObject, file: Path, places: dict[str, int], name: str) -> Entry:
    """What the kernel does with this one."""
    with caller(file, places) as process:
        try:
            link = bpf.attach_uprobe("empty", str(file), places[name], 0, at_return=False)
        except ProbeError:
            return Entry.REFUSED
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{places[name]} 3\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        bpf.detach(link)
    return Entry.SINGLE_STEPPED if said["stepped"] else Entry.EMULATED


@pytest.mark.parametrize("name", CODES)
def test_the_kernel_does_with_an_instruction_what_is_said_of_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / "code"
    places = write(file, CODES)
    told = entry(CODES[name][:LONGEST_BYTES], kernel_version(platform.release()), platform.machine())
    with BpfObject(_BUILT / "empty.bpf.o") as bpf:
        assert seen(bpf, file, places, name) is told
