# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When a stopped process may run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.probes.abi import (
    ANNOUNCED_NS,
    HASTY_ALWAYS,
    PAUSE_GATE,
    PAUSE_QUEUE,
    RULE_GATE,
    RULE_PACE,
    RULE_SOFT,
    SLOTS,
    TRUSTED,
    Gate,
    Pause,
    ProcessKey,
    Rule,
)
from enforce.actuators.launch.resume import LOW_WATER_RATIO, ResumeSchedule, drain_ns

MS = 1_000_000
HOLD = 20 * MS
KERNEL = MS // 4


def pause(
    at: int, *, reason: int = PAUSE_QUEUE, queued: int = 2 * MS, rate: int = 1_000_000, tgid: int = 7, charged: int = 0
) -> Pause:
    rule = Rule(
        flags=RULE_PACE | (RULE_GATE if reason == PAUSE_GATE else 0),
        rate_ppm=rate,
        max_queued_ns=2 * MS,
        max_pause_ns=200 * MS,
        floor_ppm=50_000,
    )
    return Pause(
        reason=reason,
        process=ProcessKey(tgid, 1),
        slot=0,
        at_ns=at,
        queued_ns=queued,
        estimate_ns=KERNEL,
        charged_ns=charged,
        rule=rule,
    )


def resumer() -> ResumeSchedule:
    return ResumeSchedule([Gate() for _ in range(SLOTS)], HOLD, 200_000)


def test_a_process_stopped_for_its_queue_runs_when_enough_has_drained() -> None:
    it = resumer()
    it.add(pause(1000 * MS))
    assert it.due(1000 * MS + MS) == []
    (due,) = it.due(1000 * MS + 2 * MS)
    assert due.stop.process.tgid == 7
    assert it.stops == {}


def test_a_smaller_share_drains_more_slowly() -> None:
    assert drain_ns(pause(0, rate=500_000)) == 2 * drain_ns(pause(0, rate=1_000_000))


def test_the_kernel_side_knows_to_what_a_queue_drains() -> None:
    source = (Path(__file__).parents[5] / "bpf" / "pace.bpf.c").read_text()
    (percent,) = re.findall(r"^#define LOW_WATER_PERCENT (\d+)$", source, re.MULTILINE)
    assert int(percent) == LOW_WATER_RATIO * 100


def test_a_process_at_a_gate_waits_until_the_online_side_is_done() -> None:
    it = resumer()
    it.gates[0].open, it.gates[0].last_online_ns = 1, 1000 * MS
    it.add(pause(1000 * MS, reason=PAUSE_GATE, queued=0))
    assert it.due(1004 * MS) == []
    assert it.gates[0].waiting == 1
    it.gates[0].open, it.gates[0].last_free_ns = 0, 1005 * MS
    assert it.due(1005 * MS) == []  # the next request may follow at once
    assert [due.stop.process.tgid for due in it.due(1005 * MS + 300_000)] == [7]
    assert it.gates[0].waiting == 0


def test_the_kernel_knows_how_many_wait_at_each_gate_and_nothing_of_an_earlier_guardians() -> None:
    gates = [Gate() for _ in range(SLOTS)]
    gates[3].waiting = 5
    it = ResumeSchedule(gates, HOLD, 200_000)
    for tgid, slot in ((7, 0), (8, 0), (9, 2)):
        stop = pause(1000 * MS, reason=PAUSE_GATE, tgid=tgid)
        stop.slot = slot
        it.add(stop)
        gates[slot].open, gates[slot].last_online_ns = 1, 1000 * MS
    assert it.due(1000 * MS) == []
    assert [gate.waiting for gate in gates[:4]] == [2, 0, 1, 0]
    gates[0].open = 0
    gates[0].last_free_ns = 1001 * MS
    assert len(it.due(1005 * MS)) == 2
    assert [gate.waiting for gate in gates[:4]] == [0, 0, 1, 0]


def test_a_request_that_arrived_and_launches_nothing_keeps_the_gate_shut_for_as_long_as_the_kernel_does() -> None:
    it = resumer()
    it.add(pause(1000 * MS, reason=PAUSE_GATE, queued=0))
    gate = it.gates[0]
    gate.last_free_ns, gate.trust, gate.served, gate.served_ns = 1002 * MS, TRUSTED, 1, 1003 * MS
    assert it.due(1003 * MS + ANNOUNCED_NS - 1) == []
    assert len(it.due(1003 * MS + ANNOUNCED_NS)) == 1


def test_an_online_side_that_went_silent_does_not_hold_the_gate() -> None:
    it = resumer()
    it.gates[0].open, it.gates[0].last_online_ns = 1, 1000 * MS
    it.add(pause(1000 * MS, reason=PAUSE_GATE, queued=0))
    assert it.due(1000 * MS + HOLD + MS) == []
    assert len(it.due(1000 * MS + HOLD + 2 * MS)) == 1


def closed_gate() -> ResumeSchedule:
    it = resumer()
    it.gates[0].open, it.gates[0].in_wait, it.gates[0].last_online_ns = 1, 1, 1000 * MS
    return it


def test_no_process_is_stopped_longer_than_the_longest_pause_and_it_gets_a_little_pass_then() -> None:
    it = closed_gate()
    it.add(pause(1000 * MS, reason=PAUSE_GATE))
    assert it.due(1199 * MS) == []
    (due,) = it.due(1200 * MS)
    assert 0 < due.pass_ns + KERNEL <= MS


def test_a_process_that_had_more_than_the_floor_before_waits_the_longest_pause() -> None:
    it = closed_gate()
    it.add(pause(1000 * MS, reason=PAUSE_GATE))
    it.stops.clear()
    it.add(pause(2000 * MS, reason=PAUSE_GATE, charged=400 * MS))  # 40 % of that second
    assert it.due(2199 * MS) == []
    assert len(it.due(2200 * MS)) == 1


def starve(floor_ppm: int, kernel_ns: int, seconds: int) -> tuple[int, int]:
    """A process that always wants to launch, at a gate that never opens: what it launched, and the most at once. ns."""
    it = closed_gate()
    it.gates[0].last_online_ns = 1 << 62
    now, charged, most = 0, 0, 0
    while now < seconds * 1000 * MS:
        charged += kernel_ns
        stop = pause(now, reason=PAUSE_GATE, charged=charged)
        stop.estimate_ns, stop.rule.floor_ppm = kernel_ns, floor_ppm
        it.add(stop)
        due_ns = it.next_ns(now)
        assert due_ns is not None
        now = max(now + 1, it.stops[next(iter(it.stops))].latest_ns)
        (due,) = it.due(now)
        through = due.pass_ns // kernel_ns * kernel_ns
        charged, most = charged + through, max(most, kernel_ns + through)
    return charged, most


@settings(max_examples=40)
@given(st.integers(10_000, 500_000), st.integers(MS // 20, 5 * MS))
def test_a_starving_process_has_its_floor_in_small_portions(floor_ppm: int, kernel_ns: int) -> None:
    launched, most = starve(floor_ppm, kernel_ns, 10)
    had = launched / (10_000 * MS) * 1_000_000
    assert had >= 0.9 * floor_ppm - 1_000_000 * (0.02 + kernel_ns / (10_000 * MS))  # but for the first pause
    assert had <= max(1.2 * floor_ppm, 1_000_000 * 1.2 * kernel_ns / (200 * MS))  # no pause is longer than max_pause
    assert most <= max(MS // 2, kernel_ns)


def test_without_a_floor_a_pause_ends_all_the_same_with_nothing_beyond_the_launch_that_was_stopped() -> None:
    it = closed_gate()
    stop = pause(1000 * MS, reason=PAUSE_GATE)
    stop.rule.floor_ppm = 0
    it.add(stop)
    (due,) = it.due(1200 * MS)
    assert due.pass_ns == 0


def test_behind_a_soft_gate_a_full_queue_drains_only_between_requests() -> None:
    it = resumer()
    it.add(stop := pause(1000 * MS))
    it.stops.clear()
    stop.rule.flags = RULE_PACE | RULE_GATE | RULE_SOFT
    drains = drain_ns(stop)
    it.gates[0].open, it.gates[0].last_online_ns = 1, 1000 * MS
    it.gates[0].busy_since_ns = 1000 * MS
    it.add(stop)
    it.gates[0].open, it.gates[0].busy_total_ns, it.gates[0].last_free_ns = 0, 5 * MS, 1005 * MS
    assert it.due(1005 * MS + 1) == []  # a gap between two requests
    assert it.due(1005 * MS + drains - 1) == []
    assert len(it.due(1005 * MS + drains)) == 1


def test_a_process_stopped_at_a_soft_gate_waits_for_what_may_follow_the_last_request() -> None:
    it = closed_gate()
    stop = pause(1000 * MS, reason=PAUSE_GATE)
    stop.rule.flags = RULE_PACE | RULE_GATE | RULE_SOFT
    stop.queued_ns = 0
    it.add(stop)
    it.gates[0].open, it.gates[0].last_free_ns = 0, 1005 * MS
    assert it.due(1005 * MS + it.open_delay_ns - 1) == []
    assert len(it.due(1005 * MS + it.open_delay_ns)) == 1


def after_requests_that_ran_for(busy_ms: int) -> ResumeSchedule:
    """Of each 10 ms of the last 100; the last one ended at 1100 ms, and a process waits for that."""
    it = resumer()
    gate = it.gates[0]
    it.add(pause(1000 * MS, reason=PAUSE_GATE))
    for at in range(1000 * MS, 1101 * MS, 10 * MS):
        gate.last_online_ns, gate.last_free_ns = at, at
        gate.busy_total_ns += busy_ms * MS
        assert it.due(at) == []
    return it


@pytest.mark.parametrize(
    ("trust", "served", "hasty", "opens"),
    [
        (TRUSTED, 0, 0, True),
        (TRUSTED - 1, 0, 0, False),
        (TRUSTED, 1, 0, False),
        (TRUSTED, 0, HASTY_ALWAYS // 2, False),
    ],
)
def test_while_requests_queue_the_gate_opens_at_once_where_the_next_one_would_be_known(
    trust: int, served: int, hasty: int, *, opens: bool
) -> None:
    it = after_requests_that_ran_for(9)
    gate = it.gates[0]
    gate.trust, gate.served, gate.hasty = trust, served, hasty
    assert bool(it.due(1100 * MS + 1)) == opens


def test_while_requests_queue_for_each_other_a_gap_between_two_of_them_is_not_filled() -> None:
    it = after_requests_that_ran_for(9)
    assert it.due(1100 * MS + MS // 4) == []
    assert len(it.due(1100 * MS + MS // 2)) == 1  # the queue is at its end


def test_where_requests_come_one_by_one_a_gap_is_filled_soon() -> None:
    assert len(after_requests_that_ran_for(5).due(1100 * MS + MS // 4)) == 1


def test_a_stop_at_a_device_that_is_not_known_waits_for_its_queue_alone() -> None:
    it = resumer()
    stop = pause(1000 * MS)
    stop.slot, stop.rule.flags = SLOTS, RULE_PACE | RULE_GATE
    it.add(stop)
    assert it.due(1000 * MS + drain_ns(stop) - 1) == []
    assert len(it.due(1000 * MS + drain_ns(stop))) == 1


def test_a_process_that_could_not_be_resumed_is_due_again() -> None:
    it = closed_gate()
    it.add(pause(1000 * MS, reason=PAUSE_GATE))
    (due,) = it.due(1200 * MS)
    it.put_back(due, 1250 * MS)
    assert it.due(1249 * MS) == []
    (again,) = it.due(1250 * MS)
    assert (again.stop.process, again.pass_ns) == (due.stop.process, due.pass_ns)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.integers(0, 10**8)), max_size=40))
def test_every_process_is_resumed_in_the_end(stops: list[tuple[int, bool, int]]) -> None:
    it = resumer()
    for tgid, gated, queued in stops:
        it.add(pause(MS, reason=PAUSE_GATE if gated else PAUSE_QUEUE, queued=queued, tgid=tgid + 2))
    waiting = {tgid + 2 for tgid, _, _ in stops}
    resumed = {due.stop.process.tgid for now in range(0, 250, 7) for due in it.due(MS + now * MS)}
    assert resumed == waiting
    assert it.next_ns(0) is None
