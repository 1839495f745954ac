# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""agent/node/instructions.py predicts of each instruction what this kernel does when a probe stands on it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.errors import ProbeError
from agent.node.instructions import LONGEST_BYTES, EntryInstruction, entry
from agent.node.preflight import kernel_version
from agent.probes.libbpf import BpfObject
from conformance.checks.probes.machine_code import FUNCTIONS, write
from conformance.clients.json_client import PROGRAMS

_BUILT = Path(__file__).parents[3] / "build" / "bpf"
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
    """A program that has the file mapped and calls the addresses that it reads."""
    command = [sys.executable, str(PROGRAMS / "calling.py"), str(file), str(places["loop"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def seen(bpf: BpfObject, file: Path, places: dict[str, int], name: str) -> EntryInstruction:
    """What the kernel does with this one."""
    with caller(file, places) as process:
        try:
            link = bpf.attach_uprobe("empty", str(file), places[name], 0, at_return=False)
        except ProbeError:
            return EntryInstruction.REFUSED
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{places[name]} 3\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        bpf.detach(link)
    return EntryInstruction.SINGLE_STEPPED if answer["stepped"] else EntryInstruction.EMULATED


@pytest.mark.parametrize("name", CODES)
def test_the_kernel_treats_each_instruction_as_we_expect(tmp_path: Path, name: str) -> None:
    file = tmp_path / "code"
    places = write(file, CODES)
    expected = entry(CODES[name][:LONGEST_BYTES], kernel_version(platform.release()), platform.machine())
    with BpfObject(_BUILT / "empty.bpf.o") as bpf:
        assert seen(bpf, file, places, name) is expected
