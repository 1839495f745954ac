# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Deliveries out of the ring that the kernel keeps of each process."""

from __future__ import annotations

from agent.collectors.launches import fresh
from agent.probes.abi import DELIVERIES, Deliveries, Delivery
from tests.support.kernel_records import A


def ring(count: int) -> Deliveries:
    """After so many deliveries, the number of each in all of its fields."""
    made = Deliveries(count=count)
    for number in range(1, count + 1):
        entry = made.ring[(number - 1) % DELIVERIES]
        for name, *_ in Delivery._fields_[:-1]:
            setattr(entry, name, number)
        entry.functions[0].function, entry.functions[0].launches = 7 * number, number
        entry.functions[1].function, entry.functions[1].launches = 8 * number, 0  # none of it
    return made


def test_each_delivery_comes_once_with_all_of_its_fields() -> None:
    found = list(fresh(A, ring(5), 3))
    assert [one.at_ns for one in found] == [4, 5]
    assert found[0] == (A, *([4] * 9), ((28, 4),))


def test_of_more_than_the_ring_keeps_the_last_ones_come() -> None:
    found = [one.elapsed_ns for one in fresh(A, ring(DELIVERIES + 9), 2)]
    assert found == list(range(10, DELIVERIES + 10))
