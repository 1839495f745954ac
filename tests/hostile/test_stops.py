# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes that end each other's stops neither switch enforcement off nor keep other tenants stopped."""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.core.clock import monotonic_ns
from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.abi import ROLE_OFFLINE, RULE_PACE, SLOT_NONE, Pace, ProcessKey, Resume, Rule
from agent.probes.libcuda import LibcudaProbes
from enforce.policy.load import parse
from enforce.recovery.guardian import LEASE_NS
from enforce.recovery.supervisor import Supervisor
from tests.hostile.programs import compile_program, pretended_libcuda
from tests.support.programs.driver import lost
from tools.harness.wait import until

MS, RATE_PPM = 1_000_000, 500_000
STORMS = 4
MAX_PAUSE_NS = 200 * MS
UNTIL_KILLED = "3600"  # seconds
FOR_EVER = 1 << 63


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda.so.1 without a device: what is measured is the kernel side and the guardian."""
    return pretended_libcuda(tmp_path_factory.mktemp("pretended"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def probes(library: Path) -> Iterator[LibcudaProbes]:
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        assert not probes.ensure(str(library)).failed
        yield probes


@pytest.fixture
def guarded(probes: LibcudaProbes, tmp_path: Path) -> Iterator[LibcudaProbes]:
    """With a guardian, whose agent is alive."""
    supervisor = Supervisor(probes, tmp_path / "ledger.jsonl", parse("version: 1\n", "defaults").tuning)
    supervisor.start()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            supervisor.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        control = probes.map("controls").share(1)[0]
        until(lambda: control.lease_until_ns > monotonic_ns(), "the lease")
        yield probes
    finally:
        over.set()
        beating.join()
        supervisor.stop()


def put_rule(probes: LibcudaProbes, process: ProcessId, launch_ns: int, rate_ppm: int = 1_000_000) -> None:
    rule = Rule(
        role=ROLE_OFFLINE,
        flags=RULE_PACE,
        rate_ppm=rate_ppm,
        max_queued_ns=MS,
        launch_ns=launch_ns,
        max_pause_ns=MAX_PAUSE_NS,
        slot_unknown=SLOT_NONE,
    )
    rule.slots[:] = [SLOT_NONE] * len(rule.slots)
    probes.map("rules").put(ProcessKey.of(process), rule)


@contextmanager
def started(program: Path, library: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """It is ready, and waits for a line."""
    pipe = subprocess.PIPE
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    with subprocess.Popen([program, *arguments], env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def lease_lasts(probes: LibcudaProbes, process: subprocess.Popen[str]) -> bool:
    """Whether the kernel could stop it from its beginning until it prints: not while the guardian stalls."""
    control = probes.map("controls").share(1)[0]
    lasts, lease_ns = True, control.lease_until_ns
    begin(process)
    assert process.stdout
    while not select.select([process.stdout], [], [], 0.001)[0]:
        before_ns, lease_ns = lease_ns, control.lease_until_ns
        lasts &= lease_ns - LEASE_NS <= before_ns  # it was renewed before it was over
    return lasts and lease_ns >= monotonic_ns()


def pace_of(probes: LibcudaProbes, process: ProcessId) -> Pace:
    return probes.map("paces").get(ProcessKey.of(process)) or Pace()


def resume_of(probes: LibcudaProbes, process: ProcessId) -> Resume:
    return probes.map("resumes").get(ProcessKey.of(process)) or Resume()


def test_four_processes_that_end_their_stops_leave_enforcement_on_and_no_other_process_stopped(
    guarded: LibcudaProbes, library: Path, programs: Path
) -> None:
    storm, honest = compile_program("stop_storm", programs), compile_program("honest_launches", programs)
    with ExitStack() as stack:
        started_ones = [stack.enter_context(started(storm, library, UNTIL_KILLED)) for _ in range(STORMS)]
        started_ones.append(stack.enter_context(started(honest, library, UNTIL_KILLED)))
        *storms, victim = (Procfs().process_id(one.pid) for one in started_ones)
        for process in storms:
            put_rule(guarded, process, 2000 * MS)  # more than a foreign resume lets through
        put_rule(guarded, victim, 2 * MS)
        for one in started_ones:
            begin(one)
        until(lambda: all(pace_of(guarded, process).foreign > 100 for process in storms), "stops that the storms end")
        before = pace_of(guarded, victim).pauses
        until(lambda: pace_of(guarded, victim).pauses > before + 20, "stops of the victim meanwhile")
        until(  # in this order: later pauses do not make up for one that was lost
            lambda: resume_of(guarded, victim).resumes == pace_of(guarded, victim).pauses, "a resume of each stop"
        )
        resume = resume_of(guarded, victim)
        print(f"{resume.resumes} pauses of the victim, on average of {resume.paused_ns / resume.resumes / MS:.1f} ms")
        assert pace_of(guarded, victim).foreign == 0
    assert "event" not in lost(guarded)


def test_a_chain_of_short_lives_gets_no_more_than_one_process(
    guarded: LibcudaProbes, library: Path, programs: Path
) -> None:
    lives, life_ms = 100, 5
    program = compile_program("short_lives", programs)
    for _ in range(20):
        with started(program, library, str(lives), str(life_ms)) as process:
            first = Procfs().process_id(process.pid)
            put_rule(guarded, first, MS, rate_ppm=RATE_PPM)
            lasted = lease_lasts(guarded, process)
            assert process.stdout
            launches, took_ns = (int(word) for word in process.stdout.readline().split())
            assert pace_of(guarded, first).charged_ns == launches * MS
        if lasted:
            break
    else:
        pytest.fail("the lease never lasted for a whole chain")
    allowed = took_ns / MS * RATE_PPM / 1_000_000
    assert allowed > lives / 2  # as most lives end at their first launch or are stopped in it
    assert launches <= 1.2 * allowed + 2


def test_a_process_that_becomes_its_program_again_and_again_stays_in_its_budget(
    probes: LibcudaProbes, library: Path, programs: Path
) -> None:
    lives, life_ms = 20, 2
    program = compile_program("exec_again", programs)
    with started(program, library, str(lives), str(life_ms)) as process:
        first = Procfs().process_id(process.pid)
        put_rule(probes, first, MS)
        begin(process)  # there is no lease: it is charged, and not stopped
        assert process.stdout
        launches = int(process.stdout.readline())
        assert launches >= lives
        assert pace_of(probes, first).charged_ns == launches * MS


def test_stops_that_a_tracer_swallows_are_counted(probes: LibcudaProbes, library: Path, programs: Path) -> None:
    launches = 500
    with started(compile_program("swallow_stops", programs), library, str(launches)) as process:
        traced = Procfs().process_id(process.pid)
        until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{process.pid}/status").read_text(), "the tracer")
        put_rule(probes, traced, 2000 * MS, rate_ppm=1)
        probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
        begin(process)
        assert process.stdout
        assert process.stdout.readline() == f"{launches}\n"
        pace = pace_of(probes, traced)
    assert (pace.pauses, pace.foreign) == (launches - 1, launches - 2)  # the last one is seen by the next launch
