# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden doctor` reports of each library what is attached, what it does not have, and what failed and why."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.probes.symbols import SYMBOLS, SymbolRole
from tools.harness.node import Node

ROOT = Path(__file__).parents[3]


def doctor(node: Node, *libraries: Path, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Its exit status and what it prints."""
    named = [argument for library in libraries for argument in ("--libcuda", str(library))]
    command = [sys.executable, "-m", "gpuwarden", "doctor", *named, *options]
    environment = {**os.environ, **node.environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def of(library: Path, output: str) -> str:
    """What it prints of one library."""
    found = re.search(rf"{re.escape(str(library))}: \d+ of .*\n(?:      .*\n)*", output)
    assert found, output
    return found[0]


@pytest.fixture
def odd_library(tmp_path: Path) -> Path:
    """A libcuda of another age: it has three calls, one of a version that is unknown here."""
    source, path = tmp_path / "odd.c", tmp_path / "libcuda.so.1"
    names = ("cuLaunchKernel", "cuMemAlloc_v2", "cuMemAlloc_v9")
    source.write_text("".join(f"int {name}(void) {{ return {n}; }}\n" for n, name in enumerate(names)))
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def test_each_library_is_listed_with_what_is_attached_what_it_lacks_and_what_is_unknown(
    node: Node, odd_library: Path
) -> None:
    status, output = doctor(node, odd_library)
    assert status == 0, output
    assert "FAIL" not in output
    assert "Simulated H200" in output
    whole = of(Path(node.environment["LD_LIBRARY_PATH"]) / "libcuda.so.1", output)
    assert f"{len(SYMBOLS)} of {len(SYMBOLS)} symbols" in whole
    for role in SymbolRole:
        count = sum(symbol.role is role for symbol in SYMBOLS)
        assert f"{role} {count}/{count}" in whole
    assert "not in this library" not in whole
    odd = of(odd_library, output)
    assert f"2 of {len(SYMBOLS)} symbols" in odd
    (absent,) = re.findall(r"not in this library: (.*)", odd)
    assert set(absent.split(", ")) == {symbol.name for symbol in SYMBOLS} - {"cuLaunchKernel", "cuMemAlloc_v2"}
    assert "newer than this program, so not seen: cuMemAlloc_v9" in odd
    assert "probed functions" not in output


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_each_probed_function_is_listed_with_its_place_if_asked_for(node: Node, odd_library: Path) -> None:
    status, output = doctor(node, odd_library, options=("--probes",))
    assert status == 0, output
    simulated = of(Path(node.environment["LD_LIBRARY_PATH"]) / "libcuda.so.1", output)
    assert re.findall(r"^ {8}(cu\w+) .* \+10 +emulated$", simulated, re.MULTILINE) == [one.name for one in SYMBOLS]
    assert re.findall(r"^ {8}(cu\w+) ", of(odd_library, output), re.MULTILINE) == ["cuLaunchKernel", "cuMemAlloc_v2"]


def test_without_return_probes_it_reports_why_and_what_is_lost(node: Node, odd_library: Path) -> None:
    status, output = doctor(node, odd_library, options=("--return-probes", "off"))
    assert status == 0, output
    assert "ok    return probes: off: --return-probes off" in output
    assert "memory is what NVML reports; not known are memory by kind" in output
    odd = of(odd_library, output)
    assert f"1 of {len(SYMBOLS)} symbols" in odd
    assert "1 need return probes, which are off" in odd
    assert "can be held, not denied" not in output


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")
def test_functions_are_named_whose_probes_are_expensive(node: Node, tmp_path: Path) -> None:
    source, path = tmp_path / "slow.c", tmp_path / "libcuda.so.1"
    begins = {"cuLaunchKernel": "push %rbp; pop %rbp", "cuGraphLaunch": "mov %rdi,%rax", "cuMemAlloc_v2": "nop"}
    source.write_text(
        "".join(f'__attribute__((naked)) int {name}(void) {{ asm("{code}; ret"); }}\n' for name, code in begins.items())
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-fcf-protection=none", str(source), "-o", str(path)], check=True)
    status, output = doctor(node, path)
    assert status == 0, output
    slow = of(path, output)
    assert "2 of 3 probes are cheap, on an instruction that the kernel emulates" in slow
    assert re.search(r"the kernel single-steps their instruction: cuGraphLaunch$", slow, re.MULTILINE)


def test_what_fails_is_listed_with_its_reason_and_hides_nothing_else(tmp_path: Path) -> None:
    rubbish = tmp_path / "libcuda.so.1"
    rubbish.write_text("no library")
    status, output = doctor(Node(tmp_path / "no-gpu-here"), rubbish)
    assert status == 3
    assert re.search(r"^FAIL  GPUs: ", output, re.MULTILINE)
    assert re.search(r"^FAIL  probes: ", output, re.MULTILINE)
    assert re.search(r"FAILED \*: .*is not an ELF library", of(rubbish, output))
    assert f"{len(SYMBOLS)} of {len(SYMBOLS)} symbols" in output
    assert re.search(r"^ok    containers' names: ", output, re.MULTILINE)


def test_a_file_that_is_not_there_is_reported(node: Node, tmp_path: Path) -> None:
    status, output = doctor(node, tmp_path / "libcuda.so.1")
    assert status == 3
    assert f"{tmp_path}/libcuda.so.1: no such file; give the path of a libcuda.so.1" in output


@pytest.mark.parametrize("installed", [True, False])
def test_where_criu_is_installed_it_says_which_processes_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: Node, installed: bool
) -> None:
    if installed:
        (tmp_path / "criu").write_text("#!/bin/sh\n")
        (tmp_path / "criu").chmod(0o755)
    others = (folder for folder in os.environ["PATH"].split(":") if not (Path(folder) / "criu").exists())
    monkeypatch.setenv("PATH", ":".join((str(tmp_path), *others)))
    _, output = doctor(node)
    assert ("ok    CRIU: installed; it refuses processes that made a probed call" in output) is installed
