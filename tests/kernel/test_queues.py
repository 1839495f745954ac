# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the kernel believes to be queued, beside an online request that runs."""

from __future__ import annotations

import pytest

from agent.clock import monotonic_ns
from agent.layout import (
    ROLE_OFFLINE,
    RULE_GATE,
    RULE_PACE,
    RULE_SOFT,
    SLOT_NONE,
    SLOTS,
    ProcessKey,
    Rule,
)
from agent.probes import Probes
from tests.kernel.driven import Driver

LAUNCH_NS = 1_000_000_000


def queued_after_a_wait(driver: Driver, probes: Probes, flags: int, *, busy: bool) -> int:
    """ns, of three launches that were waited for."""
    probes.ensure(str(driver.libcuda))
    with driver.start("3*launch:1x1x1:32x1x1", "sync") as driven:
        key = ProcessKey.of(driven.process)
        rule = Rule(role=ROLE_OFFLINE, flags=flags, rate_ppm=1, max_queued_ns=10 * LAUNCH_NS, launch_ns=LAUNCH_NS)
        rule.slots[:] = [SLOT_NONE] * len(rule.slots)
        rule.slots[0] = rule.slot_unknown = 0
        probes.map("rules").put(key, rule)
        gate = probes.map("gates").share(SLOTS)[0]
        gate.open = gate.in_wait = int(busy)  # nobody stops anybody: there is no lease
        gate.busy_since_ns = gate.last_online_ns = monotonic_ns()
        driven.begin()
        driven.finish()
        pace = probes.map("paces").get(key)
        gate.open = gate.in_wait = 0
    assert pace is not None
    assert pace.charged_ns == 3 * LAUNCH_NS
    return int(pace.queues[0].queued_ns)


@pytest.mark.parametrize("flags", [RULE_PACE, RULE_PACE | RULE_GATE, RULE_PACE | RULE_GATE | RULE_SOFT])
def test_who_has_waited_for_all_of_its_work_has_none_queued(driver: Driver, fresh_probes: Probes, flags: int) -> None:
    assert queued_after_a_wait(driver, fresh_probes, flags, busy=False) == 0


def test_behind_a_soft_gate_what_ran_beside_a_request_stays_counted(driver: Driver, fresh_probes: Probes) -> None:
    flags = RULE_PACE | RULE_GATE | RULE_SOFT
    assert queued_after_a_wait(driver, fresh_probes, flags, busy=True) == pytest.approx(3 * LAUNCH_NS, rel=1e-3)
