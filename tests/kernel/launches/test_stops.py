# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Nobody is stopped of whom the guardian would not hear."""

from __future__ import annotations

import os
import select
import signal

import pytest

from agent.core.clock import monotonic_ns
from agent.node.procfs import Procfs
from agent.probes.abi import ROLE_OFFLINE, RULE_GATE, RULE_PACE, RULE_SOFT, SLOT_NONE, SLOTS, ProcessKey, Rule
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, a_cpu_that_is_taken_away, lost

LAUNCHES = 3000  # more stops than the ring of stops has room for
FOR_EVER = 1 << 63
THREADS = 8


def resume_until_done(driven: Driven) -> None:
    while not select.select([driven.stdout], [], [], 0)[0]:
        if Procfs().stat(driven.process.tgid).state == "T":
            os.kill(driven.process.tgid, signal.SIGCONT)
    driven.finish()


def test_when_the_ring_of_stops_is_full_launches_go_through(driver: Driver, fresh_probes: LibcudaProbes) -> None:
    fresh_probes.ensure(str(driver.libcuda))
    with driver.start(f"{LAUNCHES}*launch:1x1x1:32x1x1") as driven:
        key = ProcessKey.of(driven.process)
        rule = Rule(role=ROLE_OFFLINE, flags=RULE_PACE, rate_ppm=1, max_queued_ns=1, launch_ns=1_000_000_000)
        rule.slots[:] = [SLOT_NONE] * len(rule.slots)
        rule.slot_unknown = SLOT_NONE
        fresh_probes.map("rules").put(key, rule)
        fresh_probes.map("controls").share(1)[0].lease_until_ns = FOR_EVER  # there is no guardian: nothing reads
        driven.begin()
        resume_until_done(driven)
        pace = fresh_probes.map("paces").get(key)
    assert pace is not None
    assert 0 < pace.pauses < LAUNCHES - 1
    assert lost(fresh_probes)["event"] == LAUNCHES - 1 - pace.pauses


@pytest.mark.parametrize(("kept_ms", "stops"), [(5, 0), (100, 1), (1000, 0)])
def test_a_soft_gate_stops_a_process_with_room_only_while_requests_queue_for_each_other(
    driver: Driver, own_probes: LibcudaProbes, kept_ms: int, stops: int
) -> None:
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
        finally:
            gate.open = gate.in_wait = 0
        pace = own_probes.map("paces").get(key)
    assert pace is not None
    assert pace.gate_pauses == stops


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
