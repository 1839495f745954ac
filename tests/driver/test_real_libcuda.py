# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Probes on NVIDIA's own libcuda: they stand where the kernel emulates, and see each entry and each return once.

Without a GPU each call returns at once, nearly always with CUDA_ERROR_NOT_INITIALIZED.

Before Linux 6.6 the agent attaches single uprobes, a perf event each. Detaching one takes a tenth of a second, under a
lock of the kernel that lets no two overlap: two minutes for all functions of the three libraries. Uprobes of one trace
event are detached together. So that single ones count every function right is shown by a trace event for all entries
and one for all returns, and that the agent's own are attached right by a part of the functions.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
_EVERY_OF_SINGLES = 24
_LEAST_FUNCTIONS = 150  # that are probed and that 535 exports
_PERF_EVENT_OPEN = 298
_TRACEPOINT = 2  # enum perf_type_id
_CLOSE_ON_EXEC = 8
Totals = Callable[[], tuple[int, int]]
"""How many entries and how many returns were counted until now"""

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


class _PerfEvent(ctypes.Structure):
    """The first version of struct perf_event_attr."""

    _fields_ = [
        ("type", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("config", ctypes.c_uint64),
        ("_unused", ctypes.c_uint64 * 6),
    ]


class _PerfEventOptions(ctypes.Structure):
    """struct bpf_perf_event_opts of libbpf."""

    _fields_ = [("sz", ctypes.c_size_t), ("bpf_cookie", ctypes.c_uint64)]


@pytest.fixture(scope="module")
def trace_events() -> Iterator[Path]:
    """A mount of tracefs, as not every machine has one."""
    with tempfile.TemporaryDirectory(prefix="tracefs-") as folder:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextmanager
def trace_event(trace_events: Path, kind: str, places: Sequence[str]) -> Iterator[int]:
    """The number of a trace event with a uprobe at each place (FILE:OFFSET). `kind`: p for entries, r for returns."""
    name = f"gpuwarden_{os.getpid()}/{kind}"
    descriptor = os.open(trace_events / "uprobe_events", os.O_WRONLY | os.O_APPEND)
    try:
        for place in places:
            os.write(descriptor, f"{kind}:{name} {place}\n".encode())
        yield int((trace_events / "events" / name / "id").read_text())
    finally:
        os.write(descriptor, f"-:{name}\n".encode())
        os.close(descriptor)


def _attach_to_event(bpf: BpfObject, event: int, cookie: int) -> None:
    """Attaches the program that counts."""
    attributes = _PerfEvent(_TRACEPOINT, ctypes.sizeof(_PerfEvent), event)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_PERF_EVENT_OPEN, ctypes.byref(attributes), -1, 0, -1, _CLOSE_ON_EXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    attach = bpf.lib._dll.bpf_program__attach_perf_event_opts
    attach.restype, attach.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    options = _PerfEventOptions(ctypes.sizeof(_PerfEventOptions), cookie)
    bpf._link(attach(bpf._program("count"), descriptor, ctypes.byref(options)), f"count to event {event}")


@contextmanager
def counting_by_events(trace_events: Path, libcuda: Path, *, at_entry: bool = False) -> Iterator[Totals]:
    """Single uprobes at the entries and returns of every function that the agent probes, each of one trace event."""
    with libcuda.open("rb") as file:
        functions = agents_functions(file.fileno(), "count", at_entry=at_entry)
    places = [f"{libcuda}:{function.probe_offset:#x}" for function in functions]
    with (
        trace_event(trace_events, "r", places) as returns,
        trace_event(trace_events, "p", places) as entries,
        BpfObject(MEASURING / "hits.bpf.o") as bpf,  # the first to go: events that are in use cannot be removed
    ):
        _attach_to_event(bpf, returns, _AT_RETURN)
        _attach_to_event(bpf, entries, 0)
        hits = bpf.map("hits", U32, U64)
        yield lambda: (sum(hits.per_cpu(U32(0))), sum(hits.per_cpu(U32(_AT_RETURN))))


def counted_of_each(
    caller: LibraryCaller, functions: Sequence[ProbedFunction], totals: Totals
) -> dict[str, tuple[int, int]]:
    """Calls one function after the other, and returns how many entries and returns were counted of each."""
    counted = {}
    for function in functions:
        entries, returns = totals()
        call_each(caller, [function])
        entries_after, returns_after = totals()
        counted[function.name] = (entries_after - entries, returns_after - returns)
    return counted


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


@pytest.mark.parametrize("mapped_before", [True, False], ids=["mapped before", "mapped after"])
def test_single_uprobes_count_each_entry_and_each_return_of_every_function_once(
    libcuda: Path, caller: LibraryCaller, trace_events: Path, mapped_before: bool
) -> None:
    with libcuda.open("rb") as file:
        functions = agents_functions(file.fileno(), "count")
    if mapped_before:
        caller.open(libcuda)
    with counting_by_events(trace_events, libcuda) as totals:
        caller.open(libcuda)
        assert counted_of_each(caller, functions, totals) == {one.name: (TIMES, TIMES) for one in functions}


@pytest.mark.parametrize("ours", ["single", "uprobe_multi"])
def test_single_uprobes_and_uprobe_multi_at_the_first_byte_and_behind_it_disturb_neither(
    libcuda: Path, caller: LibraryCaller, trace_events: Path, ours: str
) -> None:
    """The others' stand at the first byte, ours behind it."""
    caller.open(libcuda)
    singles_at_entry = ours != "single"
    with (
        counting_by_events(trace_events, libcuda, at_entry=singles_at_entry) as totals,
        counting(libcuda, multi=True, at_entry=not singles_at_entry) as multi,
    ):
        counted = counted_of_each(caller, multi.functions, totals)
        assert counted == {one.name: (TIMES, TIMES) for one in multi.functions}
        assert multi.entries() == multi.returns() == dict.fromkeys(counted, TIMES)


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
