# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Without return probes launches are counted, and nothing else: no figure that a return would have completed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes import abi
from agent.probes.libcuda import LibcudaProbes
from agent.probes.symbols import SYMBOLS, WITHOUT_RETURNS
from tests.support.programs.driver import MIXED_OPERATIONS, Driver, launched, lost

_OF_CALLS = ("memory", "allocations", "copies", "latencies", "delivered", "calls", "freeings", "contexts", "charges")


@pytest.fixture(scope="module")
def entries_alone(driver: Driver) -> Iterator[LibcudaProbes]:
    with LibcudaProbes(preflight.bpf_object(), Procfs(), "a reason") as probes:
        assert not probes.ensure(str(driver.libcuda)).failed
        yield probes


def test_launches_are_counted_exactly_on_a_device_that_is_not_known(
    driver: Driver, entries_alone: LibcudaProbes
) -> None:
    driven = driver.run(*MIXED_OPERATIONS)
    unknown = abi.DEVICE_UNKNOWN
    assert launched(entries_alone, driven.process) == {
        (unknown, driven.function(0)): (4 * 23, 4 * 23 * 105, 32),
        (unknown, driven.function(0, 1)): (7, 14, 32),
    }
    assert not lost(entries_alone)


@pytest.mark.parametrize("name", _OF_CALLS)
def test_nothing_waits_for_a_return_and_nothing_is_booked_that_needs_one(
    driver: Driver, entries_alone: LibcudaProbes, name: str
) -> None:
    driver.run(*MIXED_OPERATIONS)
    bpf, key = entries_alone.bpf, ctypes.create_string_buffer(256)
    assert bpf.lib.bpf_map_get_next_key(bpf.map_fd(name), None, key), "the map is not empty"


def test_the_status_of_a_library_counts_what_is_off_by_role(driver: Driver, entries_alone: LibcudaProbes) -> None:
    status = entries_alone.ensure(str(driver.libcuda)).status()
    on = sum(symbol.role in WITHOUT_RETURNS for symbol in SYMBOLS)
    assert (status.attached, status.off, status.failed) == (on, len(SYMBOLS) - on, 0)
    assert (status.roles["alloc"].attached, status.roles["launch"].off) == (0, 0)
    assert status.roles["alloc"].off > 0


def test_no_allocation_can_be_denied(entries_alone: LibcudaProbes) -> None:
    assert not entries_alone.can_deny


def test_a_request_that_never_ends_does_not_keep_its_gate_shut(driver: Driver, entries_alone: LibcudaProbes) -> None:
    with driver.start("launch:1x1x1:1x1x1", "sync") as driven:
        rule = abi.Rule(role=abi.ROLE_ONLINE, slot_unknown=0)
        entries_alone.map("rules").put(abi.ProcessKey.of(driven.process), rule)
        driven.begin()
        driven.finish()
        gate = entries_alone.map("gates").share(abi.SLOTS)[0]
        assert gate.last_online_ns > 0
        assert gate.in_wait == 0, "only a wait that is seen to begin and not to end would keep it shut for long"
