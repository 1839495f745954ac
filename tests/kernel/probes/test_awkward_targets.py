# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that are traced while they are watched, and programs with hardly any stack: they run on, and counts are
right."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node import preflight
from agent.node.elf_functions import function_offset
from agent.probes import abi
from agent.probes.libbpf import load_uprobes
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import MIXED_OPERATIONS, Driven, Driver, assert_mixed_operations
from tools.harness.wait import until

_SOURCE = Path(__file__).parents[2] / "support" / "programs" / "small_stacks.c"
_LEAVES, _FORKS = 100 * 10, 50  # of small_stacks.c
_DEADLINE_SECONDS = 60

traced = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing: run `make packages-test`")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where strace writes."""
    return tmp_path / "strace.log"


@traced
def test_a_program_that_is_traced_from_its_start_runs_on_and_is_counted_exactly(
    driver: Driver, probes: LibcudaProbes, log: Path
) -> None:
    script = log.with_name("traced")
    script.write_text(f'#!/bin/sh\nexec strace -D -f -qq -o {log} {driver.program} "$@"\n')  # -D: the program keeps
    script.chmod(0o755)  # its pid, and strace is another's
    driven = replace(driver, program=script).run(*MIXED_OPERATIONS)
    assert_mixed_operations(probes, driven.process, (driven.function(0), driven.function(0, 1)))
    until(lambda: 'write(1, "done' in log.read_text(), "each system call to be in strace's log")
    assert "SIGSEGV" not in log.read_text()


@contextmanager
def strace(driven: Driven, log: Path) -> Iterator[None]:
    """Attached to a program that runs, and gone again."""
    command = ["strace", "-f", "-o", str(log), "-p", str(driven.process.tgid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        try:
            assert tracer.stderr
            assert "attached" in tracer.stderr.readline()
            yield
        finally:
            tracer.terminate()  # it detaches


@traced
def test_a_tracer_may_come_and_go_while_a_program_is_watched(driver: Driver, probes: LibcudaProbes, log: Path) -> None:
    with driver.start(*MIXED_OPERATIONS) as driven:
        with strace(driven, log):
            driven.begin()
            driven.finish()
        assert_mixed_operations(probes, driven.process, (driven.function(0), driven.function(0, 1)))
    assert 'write(1, "done' in log.read_text()


def test_threads_with_a_kilobyte_of_stack_forks_inside_a_call_and_shared_stacks_survive_and_each_return_is_counted(
    tmp_path: Path,
) -> None:
    program = tmp_path / "small_stacks"
    subprocess.run(["gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, _SOURCE], check=True)
    pipe = subprocess.PIPE
    with (
        load_uprobes(preflight.bpf_object().with_name("uprobe.bpf.o"), ("uprobe_enter", "uprobe_return")) as bpf,
        subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True) as process,
    ):
        recorded = bpf.map("recorded", abi.U32, abi.Latency)
        recorded.put(abi.U32(1), abi.Latency())
        with program.open("rb") as file:
            for name in ("leaf", "forking"):
                offset = function_offset(file.fileno(), name, None, nothrow=True)
                for at_return in (True, False):
                    called = "uprobe_return" if at_return else "uprobe_enter"
                    bpf.attach_uprobes(called, str(program), [(offset, 1)], at_return=at_return)
        bpf.map("wanted", abi.U32, abi.U32 * 2).put(abi.U32(process.pid), (abi.U32 * 2)(1, 1))
        output, _ = process.communicate("\n", timeout=_DEADLINE_SECONDS)
        assert (process.returncode, output) == (0, "ready\ndone\n")
        latency = recorded.get(abi.U32(1))
        assert latency
        assert latency.count == _LEAVES + _FORKS
