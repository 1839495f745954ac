# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whose turn it is: the earliest deadline first, one request at a time on a device, and no wait without an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ProcessId
from agent.probes.abi import PAUSE_TURN, SLOTS, Gate, Pause, ProcessKey, Rule, Turn
from enforce.actuators.launch.resume import ResumeSchedule

MS = 1_000_000
BEGUN = 1000 * MS
WITHIN = 30 * MS


def schedule() -> ResumeSchedule:
    gates, turns = [Gate() for _ in range(SLOTS)], [Turn() for _ in range(SLOTS)]
    return ResumeSchedule(gates, 20 * MS, 200_000, turns=turns)


def owner(tgid: int) -> int:
    return 1 << 32 | tgid


def take(it: ResumeSchedule, tgid: int, slot: int = 0, until_ns: int = BEGUN + WITHIN) -> None:
    """As the kernel does for a request that finds the device free."""
    it.turns[slot].owner, it.turns[slot].until_ns = owner(tgid), until_ns


def wait(it: ResumeSchedule, tgid: int, due_ns: int, slot: int = 0, at_ns: int = BEGUN) -> None:
    rule = Rule(max_pause_ns=200 * MS, deadline_ns=WITHIN)
    process = ProcessKey(tgid, 1)
    it.add(Pause(reason=PAUSE_TURN, process=process, slot=slot, at_ns=at_ns, due_ns=due_ns, rule=rule))


def given_turns(it: ResumeSchedule, now_ns: int) -> list[int]:
    return [due.stop.process.tgid for due in it.due(now_ns)]


def test_the_earliest_deadline_has_the_next_turn_when_the_present_one_is_given_back() -> None:
    it = schedule()
    take(it, 7)
    wait(it, 8, BEGUN + 30 * MS)
    wait(it, 9, BEGUN + 20 * MS)
    assert given_turns(it, BEGUN + MS) == []
    assert it.turns[0].waiting == 2
    it.turns[0].owner = 0
    assert given_turns(it, BEGUN + 2 * MS) == [9]
    assert (it.turns[0].owner, it.turns[0].since_ns) == (owner(9), BEGUN + 2 * MS)
    assert it.turns[0].until_ns == BEGUN + 2 * MS + WITHIN
    assert it.turns[0].waiting == 1
    assert given_turns(it, BEGUN + 3 * MS) == []


def test_nothing_is_awaited_but_the_end_of_the_turn() -> None:
    it = schedule()
    take(it, 7)
    wait(it, 8, BEGUN + 30 * MS)
    assert it.next_ns(BEGUN) == BEGUN + WITHIN
    it.turns[0].owner = 0
    assert it.next_ns(BEGUN + MS) == BEGUN + MS


def test_each_device_has_turns_of_its_own() -> None:
    it = schedule()
    take(it, 7, slot=0)
    wait(it, 8, BEGUN + 30 * MS, slot=0)
    wait(it, 9, BEGUN + 30 * MS, slot=1)
    assert given_turns(it, BEGUN) == [9]


def test_a_request_that_is_late_already_yields_to_one_that_can_still_be_in_time() -> None:
    it = schedule()
    wait(it, 8, BEGUN - MS, at_ns=BEGUN - 31 * MS)
    wait(it, 9, BEGUN + 30 * MS)
    assert given_turns(it, BEGUN) == [9]
    it.turns[0].owner = 0
    assert given_turns(it, BEGUN + MS) == [8]


def test_a_turn_that_is_never_given_back_ends_with_the_time_of_a_request() -> None:
    it = schedule()
    take(it, 7, until_ns=BEGUN + 5 * MS)
    wait(it, 8, BEGUN + 30 * MS)
    assert given_turns(it, BEGUN + 5 * MS - 1) == []
    assert given_turns(it, BEGUN + 5 * MS) == [8]


def test_no_request_waits_longer_than_the_longest_pause() -> None:
    it = schedule()
    take(it, 7, until_ns=1 << 62)
    wait(it, 8, BEGUN + 30 * MS)
    assert it.next_ns(BEGUN) == BEGUN + 200 * MS
    assert given_turns(it, BEGUN + 200 * MS) == [8]
    assert it.turns[0].owner == owner(7)


def test_the_turn_of_a_process_that_has_ended_is_free() -> None:
    it = schedule()
    wait(it, 8, BEGUN + 20 * MS)
    wait(it, 9, BEGUN + 30 * MS)
    assert given_turns(it, BEGUN) == [8]
    it.end_turn(ProcessId(8, 1))
    assert given_turns(it, BEGUN) == [9]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), min_size=1, max_size=20))
def test_whatever_waits_gets_its_turn_in_the_order_of_deadlines_and_only_one_at_a_time(
    requests: list[tuple[int, int]],
) -> None:
    it, now_ns = schedule(), BEGUN
    deadlines = {tgid: BEGUN + ms * MS for tgid, (_, ms) in enumerate(requests, 1)}
    slots = {tgid: slot for tgid, (slot, _) in enumerate(requests, 1)}
    for tgid, due_ns in deadlines.items():
        wait(it, tgid, due_ns, slots[tgid])
    order: list[int] = []
    while it.stops:
        now = given_turns(it, now_ns)
        assert len({slots[tgid] for tgid in now}) == len(now) > 0
        order += now
        for turn in it.turns:
            turn.owner = 0
    assert sorted(order) == sorted(deadlines)
    for slot in set(slots.values()):
        ends = [deadlines[tgid] for tgid in order if slots[tgid] == slot]
        assert ends == sorted(ends)
