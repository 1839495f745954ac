# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Since when online requests have kept a device without a gap worth the name: a soft gate turns hard by it."""

from __future__ import annotations

import ctypes

from agent.core.clock import monotonic_ns
from agent.probes.abi import ORDINALS, ROLE_ONLINE, SLOTS, Gate, ProcessKey, Rule
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driver

SECOND_NS = 1_000_000_000
KERNEL_NS = 2_000_000
REQUEST = (f"launch:1x1x1:32x1x1:0:{KERNEL_NS}", "sync")
LONG_AGO_NS = 1  # what no probe writes


def after_requests(driver: Driver, probes: LibcudaProbes, count: int, *, freed_ns: int, open_since_ns: int = 0) -> Gate:
    """A device's gate after `count` requests one after another, freed before at `freed_ns` or open since then."""
    gate = probes.map("gates").share(SLOTS)[0]
    probes.ensure(str(driver.libcuda))
    with driver.start(*REQUEST * count) as driven:
        rule = Rule(role=ROLE_ONLINE, slots=(ctypes.c_uint8 * ORDINALS)(), slot_unknown=0)
        probes.map("rules").put(ProcessKey.of(driven.process), rule)
        gate.stretch_since_ns, gate.last_free_ns = LONG_AGO_NS, freed_ns
        gate.open = int(open_since_ns > 0)
        gate.busy_since_ns = open_since_ns
        gate.last_online_ns = open_since_ns or monotonic_ns() + 60 * SECOND_NS  # heard of lately, unless one is open
        driven.begin()
        driven.finish()
    return Gate.from_buffer_copy(gate)


def test_a_request_that_had_waited_for_the_one_before_goes_on_with_its_stretch(
    driver: Driver, fresh_probes: LibcudaProbes
) -> None:
    freed_ns = monotonic_ns() + 60 * SECOND_NS  # the one before ends on another CPU just after this one begins
    assert after_requests(driver, fresh_probes, 1, freed_ns=freed_ns).stretch_since_ns == LONG_AGO_NS


def test_requests_back_to_back_are_one_stretch(driver: Driver, fresh_probes: LibcudaProbes) -> None:
    gate = after_requests(driver, fresh_probes, 5, freed_ns=LONG_AGO_NS)
    assert gate.last_free_ns - gate.stretch_since_ns >= 5 * KERNEL_NS


def test_after_a_gap_a_new_stretch_begins(driver: Driver, fresh_probes: LibcudaProbes) -> None:
    began_ns = monotonic_ns()
    assert after_requests(driver, fresh_probes, 1, freed_ns=began_ns - SECOND_NS).stretch_since_ns > began_ns


def test_a_request_that_counted_as_over_begins_a_stretch_when_more_is_heard_of_it(
    driver: Driver, fresh_probes: LibcudaProbes
) -> None:
    began_ns = monotonic_ns()
    gate = after_requests(driver, fresh_probes, 1, freed_ns=LONG_AGO_NS, open_since_ns=began_ns - SECOND_NS)
    assert gate.open == 1  # the one that was open, and never ended
    assert gate.stretch_since_ns > began_ns
