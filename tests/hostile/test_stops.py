# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes that end each other's stops neither switch enforcement off nor keep other tenants stopped."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from agent.core.clock import monotonic_ns
from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.abi import ROLE_OFFLINE, RULE_PACE, SLOT_NONE, ProcessKey, Rule
from agent.probes.libcuda import LibcudaProbes
from enforce.policy.load import parse
from enforce.recovery.supervisor import Supervisor
from tests.hostile.programs import compile_program, pretended_libcuda
from tests.support.programs.driver import lost
from tools.harness.wait import until

MS, RATE_PPM = 1_000_000, 500_000
STORMS, STORM_SECONDS = 4, 4
MAX_PAUSE_NS = 200 * MS
MOST_LATE_NS = 300 * MS  # of a machine whose every processor storms …
MOST_MISSING_RATIO = 0.05  # … and now and then gives the guardian none for longer than the lease


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libcuda.so.1 without a device: what is measured is the kernel side and the guardian."""
    return pretended_libcuda(tmp_path_factory.mktemp("pretended"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def probes(library: Path, tmp_path: Path) -> Iterator[LibcudaProbes]:
    """With a guardian, whose agent is alive."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        assert not probes.ensure(str(library)).failed
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


def missing_lease_ratio(probes: LibcudaProbes, seconds: float) -> float:
    """Share of the samples, one each ms, at which nothing could be stopped."""
    control, missing, samples = probes.map("controls").share(1)[0], 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        samples += 1
        missing += control.lease_until_ns < monotonic_ns()
        time.sleep(0.001)
    return missing / samples


def test_four_processes_that_end_their_stops_leave_enforcement_on_and_no_other_process_stopped(
    probes: LibcudaProbes, library: Path, programs: Path
) -> None:
    storm, honest = compile_program("stop_storm", programs), compile_program("honest_launches", programs)
    with ExitStack() as stack:
        storms = [stack.enter_context(started(storm, library, str(STORM_SECONDS))) for _ in range(STORMS)]
        victim = stack.enter_context(started(honest, library, str(STORM_SECONDS - 1)))
        for process in storms:
            put_rule(probes, Procfs().process_id(process.pid), 2000 * MS)  # more than a foreign resume lets through
        mine = Procfs().process_id(victim.pid)
        put_rule(probes, mine, 2 * MS)
        for process in [*storms, victim]:
            begin(process)
        missing = missing_lease_ratio(probes, STORM_SECONDS - 1)
        key = ProcessKey.of(mine)
        assert victim.stdout
        longest_ns, launches = (int(word) for word in victim.stdout.readline().split())
        pace, resume = probes.map("paces").get(key), probes.map("resumes").get(key)
        stormed = [probes.map("paces").get(ProcessKey.of(Procfs().process_id(one.pid))) for one in storms]
    assert missing < MOST_MISSING_RATIO
    assert pace is not None
    assert resume is not None
    assert pace.pauses > 20
    assert launches > 20
    assert (resume.resumes, pace.foreign) == (pace.pauses, 0)  # none was lost, and none resumed by another
    assert longest_ns < MAX_PAUSE_NS + MOST_LATE_NS
    assert "event" not in lost(probes)
    assert all(one is not None and one.foreign > 100 for one in stormed)


def test_a_chain_of_short_lives_gets_no_more_than_one_process(
    probes: LibcudaProbes, library: Path, programs: Path
) -> None:
    lives, life_ms = 100, 5
    with started(compile_program("short_lives", programs), library, str(lives), str(life_ms)) as process:
        first = Procfs().process_id(process.pid)
        put_rule(probes, first, MS, rate_ppm=RATE_PPM)
        begin(process)
        assert process.stdout
        launches, took_ns = (int(word) for word in process.stdout.readline().split())
        pace = probes.map("paces").get(ProcessKey.of(first))
    allowed = took_ns / MS * RATE_PPM / 1_000_000
    assert pace is not None
    assert pace.charged_ns == launches * MS
    assert allowed > lives / 2  # as most lives end at their first launch or are stopped in it
    assert launches <= 1.2 * allowed + 2


def test_stops_that_a_tracer_swallows_are_counted(probes: LibcudaProbes, library: Path, programs: Path) -> None:
    launches = 500
    with started(compile_program("swallow_stops", programs), library, str(launches)) as process:
        traced = Procfs().process_id(process.pid)
        until(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{process.pid}/status").read_text(), "the tracer")
        put_rule(probes, traced, 2000 * MS)
        begin(process)
        assert process.stdout
        assert process.stdout.readline() == f"{launches}\n"
        pace, resume = (probes.map(name).get(ProcessKey.of(traced)) for name in ("paces", "resumes"))
    assert pace is not None
    assert resume is not None
    assert pace.pauses > launches / 2
    assert pace.pauses - resume.resumes - 1 <= pace.foreign < pace.pauses
