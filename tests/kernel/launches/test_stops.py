# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""No process is stopped without a record to the guardian, and none fills its ring."""

from __future__ import annotations

import os
import select
import signal

import pytest

from agent.core.clock import monotonic_ns
from agent.node.procfs import Procfs
from agent.probes.abi import (
    LOST,
    PAUSE_STOPPED,
    ROLE_OFFLINE,
    RULE_GATE,
    RULE_PACE,
    RULE_SOFT,
    SLOT_NONE,
    SLOTS,
    U32,
    ProcessKey,
    Rule,
    Tenant,
)
from agent.probes.libbpf import RingBuffer
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import (
    Driven,
    Driver,
    a_cpu_that_is_taken_away,
    lost,
    records,
    resume_until_done,
)

LAUNCHES = 3000
MORE_THAN_A_PASS_NS = 2_000_000_000  # what a process may launch once another one has resumed it
FOR_EVER = 1 << 63
THREADS = 8


def stop_each(probes: LibcudaProbes, driven: Driven) -> ProcessKey:
    """Has each launch but the first one stopped; there is no guardian, so nothing is read."""
    key = ProcessKey.of(driven.process)
    rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, rate_ppm=1, max_queued_ns=1, launch_ns=MORE_THAN_A_PASS_NS)
    rule.slots[:] = [SLOT_NONE] * len(rule.slots)
    rule.slot_unknown = SLOT_NONE
    probes.map("rules").put(key, rule)
    probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
    return key


def test_a_process_that_others_resume_costs_one_record_and_each_of_its_stops_is_counted(
    driver: Driver, fresh_probes: LibcudaProbes
) -> None:
    fresh_probes.ensure(str(driver.libcuda))
    with driver.start(f"{LAUNCHES}*launch:1x1x1:32x1x1") as driven:
        key = stop_each(fresh_probes, driven)
        driven.begin()
        resume_until_done(driven)
        pace, stop = fresh_probes.map("paces").get(key), fresh_probes.map("stops").get(key)
    assert pace is not None
    assert stop is not None
    assert (pace.pauses, pace.foreign) == (LAUNCHES - 1, LAUNCHES - 2)
    assert stop.at_ns < stop.ran_ns <= stop.foreign_ns
    assert [(wake.kind, wake.process.tgid) for wake in records(fresh_probes)] == [(PAUSE_STOPPED, driven.process.tgid)]
    assert "event" not in lost(fresh_probes)


def test_a_stop_after_the_guardian_has_taken_the_last_one_is_reported_again_and_not_as_foreign(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    with driver.start("200*launch:1x1x1:32x1x1") as driven:
        key = stop_each(own_probes, driven)
        records(own_probes)
        driven.begin()
        taken = 0
        while not select.select([driven.stdout], [], [], 0)[0]:
            if Procfs().stat(driven.process.tgid).state == "T":
                taken += own_probes.map("stops").take(key) is not None
                os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
        pace = own_probes.map("paces").get(key)
    assert pace is not None
    assert (taken, pace.pauses, pace.foreign) == (199, 199, 0)
    assert len([wake for wake in records(own_probes) if wake.process.tgid == key.tgid]) == 199


def test_the_ring_is_read_no_further_than_asked(driver: Driver, own_probes: LibcudaProbes) -> None:
    with driver.start("20*launch:1x1x1:32x1x1") as driven:
        key = stop_each(own_probes, driven)
        records(own_probes)
        driven.begin()
        while not select.select([driven.stdout], [], [], 0)[0]:
            if Procfs().stat(driven.process.tgid).state == "T":
                own_probes.map("stops").delete(key)
                os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
    read: list[bytes] = []
    ring = RingBuffer(own_probes.bpf.lib, own_probes.bpf.map_fd("pauses"), read.append)
    counts = []
    for _ in range(4):
        ring.consume(6)
        counts.append(len(read))
    ring.close()
    assert counts == [6, 12, 18, 19]


@pytest.mark.parametrize(("kept_ms", "until_ms", "stops"), [(5, 12, 0), (100, 400, 1), (1000, 1 << 20, 0)])
def test_a_soft_gate_stops_a_process_with_room_only_while_requests_queue_for_each_other(
    driver: Driver, own_probes: LibcudaProbes, kept_ms: int, until_ms: int, stops: int
) -> None:
    for _ in range(20):
        pauses, took_ms = _pauses_behind_a_soft_gate(driver, own_probes, kept_ms)
        if kept_ms + took_ms < until_ms:
            break  # else the machine stalled, and the requests had queued for longer when it launched
    else:
        pytest.fail(f"it never launched within {until_ms - kept_ms} ms")
    assert pauses == stops


def _pauses_behind_a_soft_gate(driver: Driver, own_probes: LibcudaProbes, kept_ms: int) -> tuple[int, float]:
    """How often one launch is stopped when requests have kept the device for so long, and what it took, ms."""
    with driver.start("launch:1x1x1:32x1x1") as driven:
        key = ProcessKey.of(driven.process)
        flags = RULE_PACE | RULE_GATE | RULE_SOFT
        rule = Rule(role=ROLE_OFFLINE, flags=flags, rate_ppm=1_000_000, max_queued_ns=FOR_EVER, launch_ns=1)
        rule.slots[:] = [0] * len(rule.slots)
        rule.slot_unknown = 0
        own_probes.map("rules").put(key, rule)
        own_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
        gate, now = own_probes.map("gates").share(SLOTS)[0], monotonic_ns()
        gate.open = gate.in_wait = 1
        gate.busy_since_ns = gate.last_online_ns = now
        gate.stretch_since_ns = now - kept_ms * 1_000_000
        try:
            driven.begin()
            resume_until_done(driven)
            took_ms = (monotonic_ns() - now) / 1e6
        finally:
            gate.open = gate.in_wait = 0
        pace = own_probes.map("paces").get(key)
    assert pace is not None
    return pace.gate_pauses, took_ms


def test_a_rule_holds_a_process_for_which_its_tenant_has_no_place_left(
    driver: Driver, fresh_probes: LibcudaProbes
) -> None:
    fresh_probes.ensure(str(driver.libcuda))
    one_process = Tenant()
    one_process.credit[LOST.index("process")] = 1
    fresh_probes.map("newcomer").put(U32(0), one_process)
    first = driver.run("launch:1x1x1:32x1x1")  # in the same cgroup: it takes the place, which no agent frees
    assert fresh_probes.map("tenant_of").get(ProcessKey.of(first.process)) is not None
    with driver.start("3*launch:1x1x1:32x1x1") as driven:
        key = stop_each(fresh_probes, driven)
        driven.begin()
        resume_until_done(driven)
        pace = fresh_probes.map("paces").get(key)
    assert fresh_probes.map("tenant_of").get(key) is None
    assert pace is not None
    assert pace.pauses == 2


def test_each_thread_stops_at_its_own_launch_though_the_first_of_them_has_lost_its_cpu(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    with a_cpu_that_is_taken_away(), driver.start(f"threads={THREADS}", "200*launch:1x1x1:32x1x1") as driven:
        key = ProcessKey.of(driven.process)
        rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, rate_ppm=1, max_queued_ns=1, launch_ns=1_000_000_000)
        rule.slots[:] = [SLOT_NONE] * len(rule.slots)
        rule.slot_unknown = SLOT_NONE
        own_probes.map("rules").put(key, rule)
        own_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER
        driven.begin()
        pauses = most = 0
        while not select.select([driven.stdout], [], [], 0)[0]:
            if Procfs().stat(driven.process.tgid).state == "T":
                pace = own_probes.map("paces").get(key)
                assert pace is not None
                most = max(most, pace.pauses - pauses)
                pauses = pace.pauses
                os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()
    assert 0 < most <= THREADS
