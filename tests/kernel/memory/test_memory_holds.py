# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Allocations that do not fit are held before they run, by the real guardian; a kernel that can deny is in
test_quota_on_stock_kernels.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.model import ContainerKey, ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import GROUP_ALL, MemoryRule, ProcessKey
from agent.probes.libcuda import LibcudaProbes
from enforce.ledger import ledger
from enforce.memory.quotas import AllocationRule, GroupQuota, GroupQuotaKey, MemoryQuotas
from enforce.model import Target
from enforce.policy.load import parse
from enforce.recovery.supervisor import Supervisor
from tests.support.programs.driver import Driven, Driver, a_cpu_that_is_taken_away, memory
from tools.harness.wait import until

MIB, MS, SECOND = 1 << 20, 1_000_000, 1_000_000_000
KEY = ContainerKey("test:training")
FOREVER = 3600 * SECOND
DEADLINE_SECONDS = 20.0
_FRESH_NS = 140 * MS  # of the guardian's 200 ms


class Warden:
    """What the agent has for this: a supervisor that beats, and bounds."""

    def __init__(self, probes: LibcudaProbes, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self._ledger = ledger.Ledger(self.path)
        self.supervisor = Supervisor(probes, self.path, parse("version: 1\n", "defaults").tuning)
        self._control = probes.map("controls").share(1)[0]
        self.bounds = MemoryQuotas(probes.map, self._ledger, Procfs())
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def start(self) -> None:
        self.supervisor.start()
        self._thread.start()
        until(lambda: self._control.lease_until_ns > time.monotonic_ns(), "the guardian's lease")

    def bound(
        self, processes: Sequence[ProcessId], limit: int, *, room: int | None = None, hold: int = FOREVER
    ) -> None:
        """One container's processes to so much, and with `room` all together to that."""
        members = tuple((process, ordinal) for process in processes for ordinal in (0,))
        sizes = (0,) * len(members)
        limits: dict[GroupQuotaKey, GroupQuota] = {(KEY, 0): GroupQuota(limit, members, sizes)}
        if room is not None:
            limits[None, 0] = GroupQuota(room, members, sizes)
        bounds = {one: AllocationRule(Target(one, KEY, (0, 1), None), True, True, hold) for one in processes}
        self.bounds.put(bounds, limits, time.monotonic_ns())

    def until_the_lease_is_fresh(self) -> None:
        """No process is held once it is over: what is to be held has to begin early in it."""
        until(lambda: self._control.lease_until_ns - time.monotonic_ns() > _FRESH_NS, "a fresh lease")

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()
        self.supervisor.stop()
        self.bounds.release_all()

    def _beat(self) -> None:
        while not self._ending.wait(0.05):
            self.supervisor.beat()


@pytest.fixture
def warden(probes: LibcudaProbes, tmp_path: Path) -> Iterator[Warden]:
    if probes.can_deny:
        pytest.skip("this kernel denies")
    warden = Warden(probes, tmp_path)
    warden.start()
    try:
        yield warden
    finally:
        warden.stop()


def is_stopped(process: ProcessId) -> bool:
    return Procfs().stat(process.tgid).state == "T"


def live(probes: LibcudaProbes, process: ProcessId) -> int:
    found = memory(probes, process).get(0)
    return sum(found.live.values()) if found else 0


@contextmanager
def started(driver: Driver, warden: Warden, limit: int, *operations: str, **more: int) -> Iterator[Driven]:
    """A program that is bounded before it does anything, and begins while the guardian's lease has long to go."""
    with driver.start(*operations) as driven:
        warden.bound([driven.process], limit, **more)
        warden.until_the_lease_is_fresh()
        driven.begin()
        yield driven


def test_an_allocation_over_the_quota_stops_its_process_before_it_runs_and_goes_on_when_there_is_room(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with started(driver, warden, 10 * MIB, f"alloc:{6 * MIB}", f"alloc:{6 * MIB}") as driven:
        until(lambda: is_stopped(driven.process), "the second allocation to be held")
        assert memory(probes, driven.process)[0].allocations == 1
        assert [entry.act for entry in ledger.read(warden.path)] == ["hold"]
        refusals = warden.bounds.refusals(KEY)
        assert (refusals.denied, refusals.held, refusals.for_room, refusals.pending_bytes) == (0, 1, 0, 6 * MIB)
        warden.bound([driven.process], 12 * MIB)
        driven.finish()
        assert live(probes, driven.process) == 12 * MIB
        assert warden.bounds.refusals(KEY).pending_bytes == 0


def test_room_kept_for_online_containers_holds_one_that_is_within_its_own_quota(driver: Driver, warden: Warden) -> None:
    with started(driver, warden, 100 * MIB, f"alloc:{6 * MIB}", f"alloc:{6 * MIB}", room=10 * MIB) as driven:
        until(lambda: is_stopped(driven.process), "the second allocation to be held")
        assert warden.bounds.refusals(KEY).for_room == 1
        warden.bound([driven.process], 100 * MIB, room=12 * MIB)
        driven.finish()


def test_what_another_process_of_the_container_frees_is_room(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with (
        driver.start(f"alloc:{6 * MIB}", "idle:5000", "free") as first,
        driver.start(f"alloc:{6 * MIB}") as second,
    ):
        warden.bound([first.process, second.process], 10 * MIB)
        first.begin()
        until(lambda: live(probes, first.process) == 6 * MIB, "the first one's memory")
        os.kill(first.process.tgid, signal.SIGSTOP)
        second.begin()
        until(lambda: is_stopped(second.process), "the second one to be held")
        os.kill(first.process.tgid, signal.SIGCONT)
        first.finish()
        second.finish()
        assert live(probes, second.process) == 6 * MIB


def test_threads_that_allocate_at_once_never_take_more_than_there_is(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with started(driver, warden, 5 * MIB, "threads=8", f"3*alloc:{MIB}") as driven:
        until(lambda: is_stopped(driven.process), "a thread to be held")
        assert live(probes, driven.process) <= 5 * MIB
        warden.bound([driven.process], 24 * MIB)
        driven.finish()
        assert live(probes, driven.process) == 24 * MIB


def test_nor_do_they_when_the_thread_that_was_stopped_has_lost_its_cpu_before_it_stops(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with a_cpu_that_is_taken_away(), started(driver, warden, MIB, "threads=8", f"50*alloc:{MIB}") as driven:
        limit = MIB
        for _ in range(24):
            until(lambda: is_stopped(driven.process), "a thread to be held")
            taken = live(probes, driven.process)
            assert taken <= limit, "a thread went on though its allocation was to be held"
            limit = taken + 12 * MIB
            warden.bound([driven.process], limit)
            until(lambda: live(probes, driven.process) > taken, "room to be used")  # noqa: B023
        warden.bound([driven.process], 400 * MIB)
        driven.finish()


@pytest.mark.parametrize(
    "operation",
    [
        f"alloc_managed:{6 * MIB}",
        f"alloc_async:{6 * MIB}",
        f"alloc_pool:{6 * MIB}",
        f"create:{6 * MIB}:0",
        f"alloc_pitch:{MIB}:6",
    ],
)
def test_every_kind_of_device_memory_counts(driver: Driver, warden: Warden, operation: str) -> None:
    with started(driver, warden, 10 * MIB, operation, operation) as driven:
        until(lambda: is_stopped(driven.process), "the second allocation to be held")
        warden.bound([driven.process], 13 * MIB)
        driven.finish()


def test_freed_memory_and_host_memory_and_other_devices_do_not_count(driver: Driver, warden: Warden) -> None:
    again = [f"alloc:{6 * MIB}", "free"]
    elsewhere = [f"create:{20 * MIB}:1", "release", "register:1048576", "unregister"]
    with started(driver, warden, 10 * MIB, *again, *elsewhere, *again) as driven:
        driven.finish()
        assert warden.bounds.refusals(KEY).held == 0


def test_no_allocation_is_held_longer_than_the_rule_allows(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with started(driver, warden, MIB, f"alloc:{6 * MIB}", hold=200 * MS) as driven:
        driven.finish()
        assert warden.bounds.refusals(KEY).held == 1
        assert live(probes, driven.process) == 6 * MIB


def test_when_the_warden_ends_a_held_process_runs_on(driver: Driver, probes: LibcudaProbes, tmp_path: Path) -> None:
    if probes.can_deny:
        pytest.skip("this kernel denies")
    warden = Warden(probes, tmp_path)
    warden.start()
    try:
        with started(driver, warden, MIB, f"2*alloc:{6 * MIB}") as driven:
            until(lambda: is_stopped(driven.process), "the allocation to be held")
            warden.supervisor.stop()
            driven.finish()
            assert ledger.read(warden.path) == []
            assert live(probes, driven.process) == 12 * MIB
    finally:
        warden.stop()


def test_a_held_process_that_dies_gives_its_place_back(driver: Driver, warden: Warden) -> None:
    with started(driver, warden, MIB, f"alloc:{6 * MIB}") as driven:
        until(lambda: is_stopped(driven.process), "the allocation to be held")
        driven.kill()
        until(lambda: warden.bounds.refusals(KEY).pending_bytes == 0, "its place to be free again")


def test_a_container_that_is_no_longer_bounded_leaves_nothing_in_the_kernel_or_the_ledger(
    driver: Driver, probes: LibcudaProbes, warden: Warden
) -> None:
    with started(driver, warden, MIB, f"alloc:{6 * MIB}") as driven:
        until(lambda: is_stopped(driven.process), "the allocation to be held")
        rule: MemoryRule | None = probes.map("memory_rules").get(ProcessKey.of(driven.process))
        assert rule is not None
        warden.bounds.release_all()
        driven.finish()
        warden.bounds.release_all()
        warden.bounds.keep([])
        assert probes.map("memory_rules").get(ProcessKey.of(driven.process)) is None
        assert list(probes.map("quotas").items()) == []
        assert [key.group for key, _ in probes.map("quota_uses").items() if key.group != GROUP_ALL] == []
        assert ledger.read(warden.path) == []
