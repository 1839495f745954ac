# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An allocation that never returns, of a library of the tenant's own, keeps no room from others for good."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import GROUP_ALL, QuotaKey
from agent.probes.libcuda import LibcudaProbes
from enforce.ledger.ledger import Ledger
from enforce.memory.quotas import AllocationRule, GroupQuota, GroupQuotaKey, MemoryQuotas
from enforce.model import Target
from enforce.policy.load import parse
from enforce.recovery.supervisor import Supervisor
from tests.hostile.programs import compile_program
from tests.support.programs.driver import Driver, lost
from tools.harness.wait import until

MIB, SECOND = 1 << 20, 1_000_000_000
PARKED, ROOM = 8_000_000, 10 * MIB  # of pretended_cuda.c; of all together
THIEF, VICTIM = ContainerKey("test:thief"), ContainerKey("test:victim")


@pytest.fixture(scope="module")
def parked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program, and the folder of its own libcuda.so.1."""
    folder = tmp_path_factory.mktemp("parked")
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,--as-needed")
    compile_program("pretended_cuda", folder, *flags).rename(folder / "libcuda.so.1")
    return compile_program("big_numbers", folder), folder


@pytest.fixture
def quotas(probes: LibcudaProbes, tmp_path: Path) -> Iterator[MemoryQuotas]:
    """With a guardian's lease, and the tick of the agent."""
    path, ending = tmp_path / "ledger.jsonl", threading.Event()
    supervisor = Supervisor(probes, path, parse("version: 1\n", "defaults").tuning)
    quotas = MemoryQuotas(probes.map, Ledger(path), Procfs())

    def beat() -> None:
        while not ending.wait(0.05):
            supervisor.beat()
            probes.expire_charges()

    supervisor.start()
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        control = probes.map("controls").share(1)[0]
        until(lambda: control.lease_until_ns > time.monotonic_ns(), "the guardian's lease")
        yield quotas
    finally:
        ending.set()
        thread.join()
        supervisor.stop()
        quotas.release_all()


def bound(quotas: MemoryQuotas, **own: tuple[ProcessId, int]) -> None:
    """Each container's process to so much, and all together to ROOM."""
    of = {THIEF: own["thief"], VICTIM: own["victim"]}
    members = tuple((process, 0) for process, _ in of.values())
    limits: dict[GroupQuotaKey, GroupQuota] = {(None, 0): GroupQuota(ROOM, members, (0, 0))}
    rules = {}
    for key, (process, limit) in of.items():
        limits[key, 0] = GroupQuota(limit, ((process, 0),), (0,))
        rules[process] = AllocationRule(Target(process, key, (0,), 0), True, True, 60 * SECOND)
    quotas.put(rules, limits, time.monotonic_ns())


def pending(probes: LibcudaProbes) -> int:
    use = probes.map("quota_uses").get(QuotaKey(GROUP_ALL, 0))
    return int(use.pending_bytes) if use else 0


@pytest.fixture
def thief(probes: LibcudaProbes, parked: tuple[Path, Path]) -> Iterator[subprocess.Popen[str]]:
    """The program, which waits for a line before it allocates."""
    program, folder = parked
    probes.ensure(str(folder / "libcuda.so.1"))
    shell = ["sh", "-c", 'read line && exec "$0" park', str(program)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    with subprocess.Popen(shell, env=environment, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def begin(thief: subprocess.Popen[str]) -> None:
    assert thief.stdin
    thief.stdin.write("go\n")
    thief.stdin.flush()


def test_an_allocation_that_never_returns_blocks_others_for_less_than_they_wait(
    driver: Driver, probes: LibcudaProbes, quotas: MemoryQuotas, thief: subprocess.Popen[str]
) -> None:
    lost_before = lost(probes).get("charge", 0)
    with driver.start(f"alloc:{6 * MIB}") as victim:
        bound(quotas, thief=(Procfs().process_id(thief.pid), 9 * MIB), victim=(victim.process, 9 * MIB))
        begin(thief)
        until(lambda: pending(probes) == PARKED, "the thief to be in its call")
        victim.begin()
        victim.finish()
        until(lambda: lost(probes).get("charge", 0) == lost_before + 1, "the charge to be dropped")
        assert pending(probes) == 0
        assert quotas.refusals(VICTIM).denied == 0


def test_what_a_container_may_never_have_keeps_no_room_from_others_while_it_waits(
    driver: Driver, probes: LibcudaProbes, quotas: MemoryQuotas, thief: subprocess.Popen[str]
) -> None:
    with driver.start(f"alloc:{6 * MIB}") as victim:
        bound(quotas, thief=(Procfs().process_id(thief.pid), MIB), victim=(victim.process, 9 * MIB))
        begin(thief)
        until(lambda: quotas.refusals(THIEF).held + quotas.refusals(THIEF).denied == 1, "the thief to be refused")
        assert pending(probes) == 0
        victim.begin()
        victim.finish()
        assert quotas.refusals(VICTIM).held + quotas.refusals(VICTIM).denied == 0


def test_a_thread_that_dies_in_its_call_gives_its_room_back_at_once(
    driver: Driver, probes: LibcudaProbes, quotas: MemoryQuotas, thief: subprocess.Popen[str]
) -> None:
    with driver.start(f"alloc:{6 * MIB}") as victim:
        bound(quotas, thief=(Procfs().process_id(thief.pid), 9 * MIB), victim=(victim.process, 9 * MIB))
        begin(thief)
        until(lambda: pending(probes) == PARKED, "the thief to be in its call")
        thief.kill()
        thief.wait()
        until(lambda: pending(probes) == 0, "its room to be free")
        victim.begin()
        victim.finish()
        assert quotas.refusals(VICTIM).held + quotas.refusals(VICTIM).denied == 0
