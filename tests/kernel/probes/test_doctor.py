# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden doctor` says of each library what is attached, what it does not have, and what failed and why."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.symbols import SYMBOLS, Role
from bench.node import Node

ROOT = Path(__file__).parents[2]


def doctor(node: Node, *libraries: Path) -> tuple[int, str]:
    """Its exit status and what it says."""
    named = [argument for library in libraries for argument in ("--libcuda", str(library))]
    command = [sys.executable, "-m", "agent", "doctor", *named]
    environment = {**os.environ, **node.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def of(library: Path, said: str) -> str:
    """What it says of one library."""
    found = re.search(rf"{re.escape(str(library))}: \d+ of .*\n(?:      .*\n)*", said)
    assert found, said
    return found[0]


@pytest.fixture
def odd_library(tmp_path: Path) -> Path:
    """A libcuda of another age: it has three calls, one of a version that nobody here knows."""
    source, path = tmp_path / "odd.c", tmp_path / "libcuda.so.1"
    names = ("cuLaunchKernel", "cuMemAlloc_v2", "cuMemAlloc_v9")
    source.write_text("".join(f"int {name}(void) {{ return {n}; }}\n" for n, name in enumerate(names)))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def test_of_each_library_it_says_what_is_attached_what_it_does_not_have_and_what_nobody_knows(
    node: Node, odd_library: Path
) -> None:
    status, said = doctor(node, odd_library)
    assert status == 0, said
    assert "FAIL" not in said
    assert "Simulated H200" in said
    whole = of(Path(node.environment["LD_LIBRARY_PATH"]) / "libcuda.so.1", said)
    assert f"{len(SYMBOLS)} of {len(SYMBOLS)} symbols" in whole
    for role in Role:
        count = sum(symbol.role is role for symbol in SYMBOLS)
        assert f"{role} {count}/{count}" in whole
    assert "not in this library" not in whole
    odd = of(odd_library, said)
    assert f"2 of {len(SYMBOLS)} symbols" in odd
    (absent,) = re.findall(r"not in this library: (.*)", odd)
    assert set(absent.split(", ")) == {symbol.name for symbol in SYMBOLS} - {"cuLaunchKernel", "cuMemAlloc_v2"}
    assert "newer than this program, so not seen: cuMemAlloc_v9" in odd


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_functions_are_named_whose_probes_are_dear(node: Node, tmp_path: Path) -> None:
    source, path = tmp_path / "slow.c", tmp_path / "libcuda.so.1"
    begins = {"cuLaunchKernel": "push %rbp; pop %rbp", "cuGraphLaunch": "mov %rdi,%rax", "cuMemAlloc_v2": "nop"}
    source.write_text(
        "".join(f'__attribute__((naked)) int {name}(void) {{ asm("{code}; ret"); }}\n' for name, code in begins.items())
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-fcf-protection=none", str(source), "-o", str(path)], check=True)
    status, said = doctor(node, path)
    assert status == 0, said
    slow = of(path, said)
    assert "2 of 3 begin with an instruction that the kernel emulates" in slow
    assert re.search(r"first instruction is stepped: cuGraphLaunch$", slow, re.MULTILINE)


def test_what_fails_is_said_with_its_reason_and_hides_nothing_else(tmp_path: Path) -> None:
    rubbish = tmp_path / "libcuda.so.1"
    rubbish.write_text("no library")
    status, said = doctor(Node(tmp_path / "no-gpu-here"), rubbish)
    assert status == 3
    assert re.search(r"^FAIL  GPUs: ", said, re.MULTILINE)
    assert re.search(r"^FAIL  probes: ", said, re.MULTILINE)
    assert re.search(r"FAILED \*: .*is not an ELF library", of(rubbish, said))
    assert f"{len(SYMBOLS)} of {len(SYMBOLS)} symbols" in said
    assert re.search(r"^ok    containers' names: ", said, re.MULTILINE)


def test_a_file_that_is_not_there_is_said(node: Node, tmp_path: Path) -> None:
    status, said = doctor(node, tmp_path / "libcuda.so.1")
    assert status == 3
    assert f"{tmp_path}/libcuda.so.1: no such file; give the path of a libcuda.so.1" in said
