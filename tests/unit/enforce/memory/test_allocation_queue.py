# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Held allocations: the oldest that fits is resumed first, and none waits for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ProcessId
from agent.probes.abi import GROUP_ALL, PAUSE_HELD, Held, ProcessKey
from enforce.memory.allocation_queue import AllocationQueue

MS = 1_000_000


@dataclass
class Kernel:
    """Limits and what is charged to them, as the kernel keeps them: a held call stays charged until it returns."""

    limits: dict[int, int]
    charged: dict[int, int] = field(default_factory=dict)

    def room(self, group: int, _slot: int) -> int | None:
        return self.limits[group] - self.charged.get(group, 0) if group in self.limits else None

    def hold(self, waiting: AllocationQueue, tgid: int, group: int, size: int, at: int = 0) -> None:
        for one in (group, GROUP_ALL):
            self.charged[one] = self.charged.get(one, 0) + size
        held = Held(PAUSE_HELD, group, ProcessKey(tgid, 1), 0, 0, at, size, 100 * MS)
        waiting.add(held)


def gone(waiting: AllocationQueue, now: int = 0) -> list[int]:
    return [hold.process.tgid for hold in waiting.due(now)]


def test_it_waits_until_there_is_room_and_then_keeps_it_from_others() -> None:
    kernel = Kernel({1: 10, GROUP_ALL: 100}, {1: 8})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 4)
    kernel.hold(waiting, 8, 1, 4)
    assert gone(waiting) == []
    kernel.charged[1] -= 2  # another process freed
    assert gone(waiting) == [7]
    assert gone(waiting) == []  # what it asked for is taken now, though its call has not returned
    assert waiting.keeps(ProcessId(8, 1))
    assert not waiting.keeps(ProcessId(7, 1))


def test_a_raised_quota_lets_it_go_and_so_does_one_that_is_lifted() -> None:
    kernel = Kernel({1: 10}, {1: 8})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 4)
    kernel.limits[1] = 12
    assert gone(waiting) == [7]
    kernel.hold(waiting, 8, 1, 4)
    del kernel.limits[1]
    assert gone(waiting) == [8]


def test_room_for_online_containers_holds_those_that_are_within_their_own_quota() -> None:
    kernel = Kernel({1: 100, GROUP_ALL: 10}, {GROUP_ALL: 8})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 4)
    assert gone(waiting) == []
    kernel.limits[GROUP_ALL] = 12
    assert gone(waiting) == [7]


def test_one_that_does_not_fit_is_no_obstacle_to_one_that_does() -> None:
    kernel = Kernel({1: 10, 2: 10})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 11)
    kernel.hold(waiting, 8, 2, 3)
    assert gone(waiting) == [8]


def test_no_process_waits_longer_than_the_rule_allows() -> None:
    kernel = Kernel({1: 0})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 4, at=5 * MS)
    assert gone(waiting, 104 * MS) == []
    assert gone(waiting, 105 * MS) == [7]
    assert waiting.expired == 1
    assert waiting.next_ns(0) is None


def test_two_threads_of_one_process_wait_for_room_for_both() -> None:
    kernel = Kernel({1: 10})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 6)
    kernel.hold(waiting, 7, 1, 6)
    assert gone(waiting) == []
    kernel.limits[1] = 12
    assert gone(waiting) == [7]
    assert not waiting.holds


def test_a_process_that_calls_the_driver_again_is_held_no_more() -> None:
    kernel = Kernel({1: 10})
    waiting = AllocationQueue(kernel.room)
    kernel.hold(waiting, 7, 1, 11, at=1000 * MS)
    kernel.hold(waiting, 8, 1, 11, at=1000 * MS)
    waiting.ran(ProcessId(7, 1), 1049 * MS)  # another of its threads, just before all had stopped
    assert waiting.keeps(ProcessId(7, 1))
    waiting.ran(ProcessId(7, 1), 1051 * MS)
    assert not waiting.keeps(ProcessId(7, 1))
    assert waiting.keeps(ProcessId(8, 1))
    kernel.hold(waiting, 8, 1, 2, at=1060 * MS)
    assert [hold.bytes for hold in waiting.holds] == [2]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 20)), max_size=12), st.integers(0, 60))
def test_what_is_resumed_in_time_is_within_every_limit(asked: list[tuple[int, int, int]], limit: int) -> None:
    kernel = Kernel({1: limit, 2: limit // 2, GROUP_ALL: limit})
    waiting = AllocationQueue(kernel.room)
    for tgid, group, size in asked:
        kernel.hold(waiting, tgid, group, size)
    let_go: set[int] = set()
    for _ in range(len(asked) + 1):
        let_go |= set(gone(waiting))
    for group, bound in kernel.limits.items():
        taken = sum(size for tgid, one, size in asked if tgid in let_go and group in (one, GROUP_ALL))
        assert taken <= bound
