# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Probes on NVIDIA's own libcuda: they stand where the kernel emulates, and see each entry and each return once.

Without a GPU each call returns at once, nearly always with CUDA_ERROR_NOT_INITIALIZED.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.instructions import EntryInstruction
from agent.node.procfs import Procfs
from agent.probes.abi import U32, U64
from agent.probes.attachment import ProbedFunction
from agent.probes.libbpf import BpfObject
from agent.probes.libcuda import LibcudaProbes
from agent.probes.symbols import SYMBOLS
from tools.harness.library_caller import LibraryCaller
from tools.harness.uprobes import MEASURING, agents_functions, attached

TIMES = 7
_AT_RETURN = 2048  # added to a function's number
_EVERY_OF_SINGLES = 12  # each takes a tenth of a second to detach
_LEAST_FUNCTIONS = 150  # that are probed and that 535 exports

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the drivers are for x86-64")


class Counted:
    """Probes that count, and the functions that they are on."""

    def __init__(self, bpf: BpfObject, functions: Sequence[ProbedFunction]) -> None:
        self._hits = bpf.map("hits", U32, U64)
        self.functions = functions

    def entries(self) -> dict[str, int]:
        return self._read(0)

    def returns(self) -> dict[str, int]:
        return self._read(_AT_RETURN)

    def _read(self, first: int) -> dict[str, int]:
        return {one.name: sum(self._hits.per_cpu(U32(first + one.cookie))) for one in self.functions}


@contextmanager
def counting(libcuda: Path, *, multi: bool, at_entry: bool = False) -> Iterator[Counted]:
    """Entry and return probes on every function that the agent probes."""
    found: list[ProbedFunction] = []

    def of(descriptor: int, *, returns: bool) -> list[ProbedFunction]:
        functions = agents_functions(descriptor, "count", at_entry=at_entry)[:: 1 if multi else _EVERY_OF_SINGLES]
        if returns:
            return [replace(one, cookie=_AT_RETURN + one.cookie, entry=None, at_return="count") for one in functions]
        found.extend(functions)
        return [replace(one, at_return=None) for one in functions]

    with BpfObject(MEASURING / "hits.bpf.o", multi={"count"} if multi else ()) as bpf, ExitStack() as stack:
        for returns in (True, False):
            attachment = stack.enter_context(attached(bpf, libcuda, partial(of, returns=returns)))
            assert not attachment.failed
        yield Counted(bpf, found)


def call_each(caller: LibraryCaller, functions: Sequence[ProbedFunction]) -> None:
    for function in functions:
        caller.call(function.name, TIMES)


def test_every_probe_is_behind_the_check_that_the_kernel_would_step(libcuda: Path) -> None:
    with libcuda.open("rb") as file:
        functions = agents_functions(file.fileno(), "count")
    assert len(functions) >= _LEAST_FUNCTIONS
    assert {function.place for function in functions} == {(10, EntryInstruction.EMULATED)}


@pytest.mark.parametrize("multi", [True, False], ids=["uprobe_multi", "single"])
@pytest.mark.parametrize("mapped_before", [True, False], ids=["mapped before", "mapped after"])
def test_each_entry_and_each_return_is_counted_once(
    libcuda: Path, caller: LibraryCaller, multi: bool, mapped_before: bool
) -> None:
    if mapped_before:
        caller.open(libcuda)
    with counting(libcuda, multi=multi) as counted:
        caller.open(libcuda)
        call_each(caller, counted.functions)
        expected = dict.fromkeys((function.name for function in counted.functions), TIMES)
        assert counted.entries() == expected
        assert counted.returns() == expected


def test_another_prober_at_the_first_byte_and_ours_behind_it_disturb_neither(
    libcuda: Path, caller: LibraryCaller
) -> None:
    caller.open(libcuda)
    with counting(libcuda, multi=True, at_entry=True) as others, counting(libcuda, multi=True) as ours:
        call_each(caller, ours.functions)
        expected = dict.fromkeys((function.name for function in ours.functions), TIMES)
        assert others.entries() == others.returns() == ours.entries() == ours.returns() == expected


def test_the_agents_own_programs_count_every_call(libcuda: Path, caller: LibraryCaller) -> None:
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        caller.open(libcuda)
        library = probes.ensure(str(libcuda))
        assert not library.failed
        assert not library.unknown_versions
        assert set(library.attached) | set(library.absent) == {symbol.name for symbol in SYMBOLS}
        before = probes.calls()
        for name in library.attached:
            caller.call(name, TIMES)
        after = probes.calls()
        assert {name: after.get(name, 0) - before.get(name, 0) for name in library.attached} == dict.fromkeys(
            library.attached, TIMES
        )
        assert dict(probes.lost())["duplicate"] == 0


def test_the_doctor_says_where_the_probes_stand(libcuda: Path) -> None:
    command = [sys.executable, "-m", "gpuwarden", "doctor", "--libcuda", str(libcuda)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    _, _, lines = output.partition(f"{libcuda}: ")
    cheap = re.search(r"^ +(\d+) of (\d+) probes are cheap, .*: \+10 \((\d+)\)$", lines, re.MULTILINE)
    assert cheap, output
    assert cheap[1] == cheap[2] == cheap[3] == lines.split()[0]
    assert "single-steps" not in lines.partition("ok    stacks")[0]
