# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a drained wait leaves of a virtual queue, and what the kernel believes to be on the GPU."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest

from agent.core.clock import monotonic_ns
from agent.node.procfs import Procfs
from agent.probes.abi import (
    ROLE_OFFLINE,
    RULE_BLOCKS,
    RULE_GATE,
    RULE_PACE,
    RULE_SOFT,
    SLOT_NONE,
    SLOTS,
    Delivery,
    Pace,
    ProcessKey,
    Queue,
    Rule,
)
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver
from tools.harness.wait import until

MS = 1_000_000
LAUNCH_NS = 1_000_000_000
FOR_EVER = 1 << 63
LAUNCH = "launch:1x1x1:32x1x1"


@dataclass(frozen=True, slots=True)
class Left:
    """What the maps say of a program that has done its operations. `lasted_ns`: no less than it took for them."""

    pace: Pace
    delivery: Delivery  # the last one
    lasted_ns: int

    @property
    def queue(self) -> Queue:
        """Of its device."""
        queue: Queue = self.pace.queues[0]
        return queue


def left(
    driver: Driver, probes: LibcudaProbes, *operations: str, stops: int = 0, stopped_seconds: float = 0.1, **rule: int
) -> Left:
    """Runs them under a rule. It must be stopped so many times, and is resumed each time."""
    with driver.start(*operations) as driven:
        key = ProcessKey.of(driven.process)
        values = {"flags": RULE_PACE, "max_queued_ns": 10 * LAUNCH_NS, "launch_ns": LAUNCH_NS, **rule}
        written = Rule(role=ROLE_OFFLINE, **values)
        written.slots[:] = [SLOT_NONE] * len(written.slots)
        written.slots[0] = written.slot_unknown = 0
        probes.map("rules").put(key, written)
        probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER if stops else 0
        began_ns = monotonic_ns()
        driven.begin()
        for _ in range(stops):
            until(lambda: Procfs().stat(driven.process.tgid).state == "T", "the stop", step_seconds=0.001)
            time.sleep(stopped_seconds)  # a stop that lasts so long is what is tested
            os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
        lasted_ns = monotonic_ns() - began_ns
        pace, ring = probes.map("paces").get(key), probes.map("delivered").get(key)
    assert pace is not None
    assert ring is not None
    assert pace.pauses == stops
    return Left(pace, ring.ring[ring.count - 1], lasted_ns)


def queued_after_a_wait(driver: Driver, probes: LibcudaProbes, flags: int, *, busy: bool) -> int:
    """ns, of three launches that were waited for at a full share."""
    gate = probes.map("gates").share(SLOTS)[0]
    gate.open = gate.in_wait = int(busy)  # no process is stopped: there is no lease
    gate.busy_since_ns = gate.last_online_ns = monotonic_ns()
    try:
        found = left(driver, probes, f"3*{LAUNCH}", "sync", flags=flags, rate_ppm=1_000_000)
    finally:
        gate.open = gate.in_wait = 0
    assert found.pace.charged_ns == 3 * LAUNCH_NS
    return int(found.queue.queued_ns)


@pytest.mark.parametrize("flags", [RULE_PACE, RULE_PACE | RULE_GATE, RULE_PACE | RULE_GATE | RULE_SOFT])
def test_a_process_that_has_waited_for_all_of_its_work_has_none_queued(
    driver: Driver, own_probes: LibcudaProbes, flags: int
) -> None:
    assert queued_after_a_wait(driver, own_probes, flags, busy=False) == 0


def test_behind_a_soft_gate_what_ran_beside_a_request_stays_counted(driver: Driver, own_probes: LibcudaProbes) -> None:
    flags = RULE_PACE | RULE_GATE | RULE_SOFT
    assert queued_after_a_wait(driver, own_probes, flags, busy=True) == pytest.approx(3 * LAUNCH_NS, rel=1e-3)


def test_a_wait_leaves_what_the_share_has_not_paid_back_however_long_launches_were_taken_to_be(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    found = left(driver, own_probes, f"3*{LAUNCH}", "idle:300", "sync", rate_ppm=500_000)
    assert found.queue.backlog_ns == 0
    assert 150 * MS <= found.queue.queued_ns <= found.lasted_ns / 2


def test_a_delivery_tells_what_is_on_the_gpu_not_what_the_share_has_to_pay_back(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    found = left(driver, own_probes, f"2*{LAUNCH}", "idle:300", "sync", rate_ppm=500_000)
    assert 2 * LAUNCH_NS - found.lasted_ns <= found.delivery.queued_ns <= 2 * LAUNCH_NS - 300 * MS


def test_a_launch_that_was_stopped_is_not_on_the_gpu_before_its_process_goes_on(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    operations = (LAUNCH, "idle:300", "sync", LAUNCH, "sync")  # the second finds 270 ms, which take 2.7 s to pay back
    found = left(driver, own_probes, *operations, stops=1, rate_ppm=100_000, max_queued_ns=LAUNCH_NS)
    assert found.delivery.pauses == 1
    assert found.delivery.queued_ns == LAUNCH_NS


def test_a_launch_that_was_stopped_is_on_the_gpu_from_the_time_on_at_which_its_process_is_due(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    operations = (LAUNCH, "idle:100", "sync", LAUNCH, "sync")  # 50 ms and more, which take twice as long to pay back
    found = left(
        driver, own_probes, *operations, stops=1, stopped_seconds=0.5, rate_ppm=500_000, max_queued_ns=LAUNCH_NS
    )
    due_ns = LAUNCH_NS - found.delivery.queued_ns  # what of the stop came after that
    assert 0 < due_ns < found.lasted_ns - 200 * MS


def test_no_more_is_left_than_the_longest_pause_pays_back(driver: Driver, own_probes: LibcudaProbes) -> None:
    limits = {"max_queued_ns": 10 * MS, "max_pause_ns": 100 * MS}
    found = left(driver, own_probes, LAUNCH, "idle:300", "sync", rate_ppm=500_000, **limits)
    assert found.queue.queued_ns == 60 * MS


def test_a_budget_of_blocks_outlives_a_wait(driver: Driver, own_probes: LibcudaProbes) -> None:
    flags = RULE_PACE | RULE_BLOCKS
    found = left(driver, own_probes, f"3*{LAUNCH}", "sync", flags=flags, rate_ppm=1_000_000)
    assert 3 * LAUNCH_NS - found.lasted_ns <= found.queue.queued_ns <= 3 * LAUNCH_NS
