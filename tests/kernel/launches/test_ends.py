# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a thread or a process leaves behind: nothing that is kept for it, and nothing in the gates' counts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from agent.probes import abi
from agent.probes.abi import ProcessKey
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver

LAUNCH = "launch:1x1x1:32x1x1:0:1000000"
ONLINE_SLOTS = (3, 7)  # of the devices 0 and 1


class _Thread(ctypes.Structure):
    _fields_ = [("tid", ctypes.c_uint32), ("tgid", ctypes.c_uint32)]


class _Anything(ctypes.Structure):  # at least as large as any value of these maps
    _fields_ = [("bytes", ctypes.c_uint8 * 4096)]


def threads_of(probes: LibcudaProbes, driven: Driven) -> list[int]:
    """The threads of a process that the kernel side knows."""
    entries = probes.bpf.map("context_stacks", _Thread, _Anything).items()
    return [key.tid for key, _ in entries if key.tgid == driven.process.tgid]


def serve_online(probes: LibcudaProbes, driven: Driven) -> None:
    """Makes it an online process on both devices."""
    rule = abi.Rule(role=abi.ROLE_ONLINE, slot_unknown=abi.SLOT_NONE)
    rule.slots[:] = [*ONLINE_SLOTS, *[abi.SLOT_NONE] * (abi.ORDINALS - len(ONLINE_SLOTS))]
    probes.map("rules").put(ProcessKey.of(driven.process), rule)


@pytest.fixture
def gates(probes: LibcudaProbes) -> Iterator[Any]:
    """Of the two devices; both are free before and must be free after."""
    gates = probes.map("gates").share(abi.SLOTS)
    yield [gates[slot] for slot in ONLINE_SLOTS]
    assert [(gates[slot].open, gates[slot].in_wait) for slot in ONLINE_SLOTS] == [(0, 0)] * 2


def test_threads_that_die_with_their_process_are_forgotten(driver: Driver, probes: LibcudaProbes) -> None:
    with driver.start("threads=5", "linger=yes", LAUNCH) as driven:
        driven.begin()
        driven.finish()
        assert len(threads_of(probes, driven)) >= 5
    assert threads_of(probes, driven) == []


def test_nothing_is_kept_of_a_process_that_died(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("threads=5", "linger=yes", LAUNCH)
    entries = probes.bpf.map("processes", ProcessKey, _Anything).items()
    assert driven.process not in [key.id() for key, _ in entries]


def test_a_gate_is_free_when_its_online_process_died_with_requests_open(
    driver: Driver, probes: LibcudaProbes, gates: Any
) -> None:
    with driver.start("threads=5", "linger=yes", LAUNCH) as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
        assert gates[0].open == 5


def test_a_request_is_over_at_the_gate_where_it_began(driver: Driver, probes: LibcudaProbes, gates: Any) -> None:
    with driver.start(LAUNCH, "set:1", LAUNCH, "sync", LAUNCH, "set:0", LAUNCH, "sync") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
        assert [gate.open for gate in gates] == [0, 0]


def test_a_request_that_launches_on_two_devices_is_counted_at_both_gates(
    driver: Driver, probes: LibcudaProbes, gates: Any
) -> None:
    with driver.start("linger=yes", LAUNCH, "set:1", LAUNCH, LAUNCH, "set:0", LAUNCH) as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
        assert [gate.open for gate in gates] == [1, 1]


def test_a_request_that_began_before_the_rule_takes_nothing_from_the_gate(
    driver: Driver, probes: LibcudaProbes, gates: Any
) -> None:
    with driver.start("threads=3", "linger=yes", LAUNCH) as driven:
        driven.begin()
        driven.finish()
        serve_online(probes, driven)
        assert [gate.open for gate in gates] == [0, 0]


def test_silent_requests_do_not_keep_a_gate_busy(driver: Driver, probes: LibcudaProbes, gates: Any) -> None:
    idle_ms = 400  # twenty times as long as a request may be silent
    before_ns = gates[0].busy_total_ns
    with driver.start(LAUNCH, f"idle:{idle_ms}", LAUNCH, f"idle:{idle_ms}", "sync") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
    assert 0 < gates[0].busy_total_ns - before_ns < idle_ms * 1_000_000


def test_a_gate_is_busy_for_all_of_a_long_wait(driver: Driver, probes: LibcudaProbes, gates: Any) -> None:
    kernel_ns = 100_000_000  # five times as long as a request may be silent
    before_ns = gates[0].busy_total_ns
    with driver.start(f"launch:1x1x1:32x1x1:0:{kernel_ns}", "sync") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
    assert gates[0].busy_total_ns - before_ns >= kernel_ns


def test_a_long_wait_keeps_the_gate_of_each_device_that_the_request_launched_on(
    driver: Driver, probes: LibcudaProbes, gates: Any
) -> None:
    kernel_ns = 100_000_000
    before_ns = gates[0].busy_total_ns
    long_kernel = f"launch:1x1x1:32x1x1:0:{kernel_ns}"
    with driver.start("threads=0", long_kernel, f"1+set:1+{LAUNCH}+sync", "sync") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
    assert gates[0].busy_total_ns - before_ns >= kernel_ns


def test_a_loop_of_queries_is_over_though_another_thread_ended_the_request(
    driver: Driver, probes: LibcudaProbes, gates: Any
) -> None:
    with driver.start("threads=0", "launch:1x1x1:32x1x1:0:100000000", "query", "1+sync", "query") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
        assert [(gate.open, gate.in_wait) for gate in gates] == [(0, 0)] * 2


def test_waits_that_end_together_end_each_request_once(driver: Driver, probes: LibcudaProbes, gates: Any) -> None:
    crowd = "8+" + "+".join(["launch:1x1x1:32x1x1", "sync", "sync"] * 100)
    with driver.start("threads=0", crowd, "2*launch:1x1x1:32x1x1:5", "sync") as driven:
        serve_online(probes, driven)
        driven.begin()
        driven.finish()
        assert [(gate.open, gate.in_wait) for gate in gates] == [(0, 0)] * 2
        found = probes.map("delivered").get(ProcessKey.of(driven.process))
        assert found is not None
        newest = found.ring[(found.count - 1) % len(found.ring)]
        assert (newest.launches, newest.functions[0].function) == (2, driven.function(5))
