# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The health of devices: worse at once, better slowly, and never by what is unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import Device, DeviceReading, DeviceUuid, Snapshot
from agent.nvml.xid import XIDS, XidSeverity, severity_of
from enforce.device_health import (
    ORDER,
    Condition,
    HealthState,
    HealthView,
    SysMonitor,
    limit,
    published,
    step,
    view,
    worst,
)
from enforce.model import Share
from enforce.policy.load import parse
from enforce.policy.model import DEFAULT_HEALTH, Bounds, HealthRule, Policy

SECOND = 10**9
DEVICE = Device(0, DeviceUuid("GPU-1"), "NVIDIA H200", "00:01", 132, 100)
RULE = HealthRule(
    unhealthy=Bounds(memory_ratio=0.8, sm_activity_ratio=0.9, sm_clock_hertz=1e9),
    overlimit=Bounds(memory_ratio=0.95),
    patience_ns=2 * SECOND,
    hold_off_ns=10 * SECOND,
    hold_off_most_ns=40 * SECOND,
    clean_ns=100 * SECOND,
    forgive_ns=60 * SECOND,
)
FINE = DeviceReading(DEVICE, sm_activity_ratio=0.5, sm_activity_source="gpm", memory_used_bytes=50, sm_clock_hertz=2e9)
FULL, FULLER = replace(FINE, memory_used_bytes=85), replace(FINE, memory_used_bytes=97)
LOST = DeviceReading(DEVICE, lost=True)
UNKNOWN = DeviceReading(DEVICE)


def xids(**counts: int) -> DeviceReading:
    return replace(FINE, xid_counts={int(name[1:]): count for name, count in counts.items()})


def play(*readings: DeviceReading, rule: HealthRule = RULE, state: HealthState | None = None) -> list[HealthState]:
    """One reading a second."""
    state, states = state or HealthState(), []
    for second, reading in enumerate(readings):
        state = step(state, reading, rule, second * SECOND)
        states.append(state)
    return states


def conditions(states: list[HealthState]) -> list[Condition]:
    return [state.condition for state in states]


def seconds_until_healthy(states: list[HealthState]) -> int:
    """After the last one that was worse."""
    return len(states) - 1 - max(at for at, state in enumerate(states) if state.condition is not Condition.HEALTHY)


def test_a_device_within_its_bounds_is_healthy_at_its_first_reading() -> None:
    assert conditions(play(FINE)) == [Condition.HEALTHY]


def test_a_device_may_have_to_be_watched_for_a_while_first() -> None:
    states = play(*[FINE] * 6, rule=replace(RULE, init_ns=4 * SECOND))
    assert conditions(states) == [Condition.INIT] * 4 + [Condition.HEALTHY] * 2


@pytest.mark.parametrize(
    ("reading", "reason"),
    [
        (FULL, "memory 85% over 80%"),
        (replace(FINE, sm_activity_ratio=0.95), "SM activity 95% over 90%"),
        (replace(FINE, sm_clock_hertz=5e8), "SM clock 500 MHz under 1000 MHz at work"),
        (xids(x63=1), "XID 63 (a memory row or page is to be retired at the next reset)"),
        (xids(x999=1), "XID 999"),
    ],
)
def test_beyond_a_bound_a_device_is_unhealthy_at_once_with_the_reason(reading: DeviceReading, reason: str) -> None:
    state = play(FINE, reading)[-1]
    assert (state.condition, state.reason) == (Condition.UNHEALTHY, reason)


@pytest.mark.parametrize(
    "reading",
    [
        UNKNOWN,
        replace(FINE, sm_activity_source="utilization", sm_activity_ratio=0.99),  # no bound on utilisation is set
        replace(FINE, sm_activity_ratio=0.05, sm_clock_hertz=3e8),  # it rests
        xids(x31=4, x45=1),  # a program's own fault
    ],
)
def test_what_is_unknown_or_not_the_devices_fault_changes_nothing(reading: DeviceReading) -> None:
    assert conditions(play(FINE, reading))[-1] is Condition.HEALTHY


def test_offline_work_has_to_leave_only_after_some_patience() -> None:
    states = play(FINE, FULLER, FULLER, FULLER)
    assert conditions(states)[1:] == [Condition.UNHEALTHY, Condition.UNHEALTHY, Condition.OVERLIMIT]
    interrupted = play(FINE, FULLER, FULLER, FULL, FULLER, FULLER)
    assert Condition.OVERLIMIT not in conditions(interrupted)


def test_a_device_gets_better_after_a_hold_off_that_doubles_with_each_relapse_up_to_a_bound() -> None:
    states: list[HealthState] = []
    waits = []
    for _ in range(5):
        start = states[-1] if states else HealthState()
        begin = len(states)
        readings = [FULL, *[FINE] * 45]
        for offset, reading in enumerate(readings):
            start = step(start, reading, RULE, (begin + offset) * SECOND)
            states.append(start)
        waits.append(45 - seconds_until_healthy(states) + 1)
    assert waits == [10, 20, 40, 40, 40]


def test_a_relapse_is_forgotten_after_long_enough_health() -> None:
    states = play(FULL, *[FINE] * 100)
    assert (states[20].relapses, states[-1].relapses) == (1, 0)


def test_an_overlimit_that_eases_becomes_unhealthy_after_the_hold_off() -> None:
    states = play(FULLER, FULLER, FULLER, *[FULL] * 60)
    assert states[2].condition is Condition.OVERLIMIT
    assert states[-1].condition is Condition.UNHEALTHY


@pytest.mark.parametrize("bad", [replace(LOST, xid_counts={79: 1}), xids(x79=1), xids(x13=1, x48=2)])
def test_a_broken_device_is_disabled_until_it_has_been_clean_for_long(bad: DeviceReading) -> None:
    clean = replace(FINE, xid_counts=bad.xid_counts)
    states = play(FINE, bad, *[clean] * 120)
    assert view(states[1]).must_leave
    assert conditions(states)[1:101] == [Condition.DISABLED] * 100
    assert conditions(states)[-1] is Condition.HEALTHY


def test_one_failed_reading_evicts_nothing_and_a_device_that_stays_lost_is_disabled() -> None:
    blink = play(FINE, LOST, *[FINE] * 20)
    assert not any(view(state).must_leave for state in blink)
    assert (blink[1].condition, blink[1].reason) == (Condition.UNHEALTHY, "the GPU does not answer")
    gone = play(FINE, LOST, LOST, LOST)
    assert conditions(gone)[1:] == [Condition.UNHEALTHY, Condition.UNHEALTHY, Condition.DISABLED]
    assert Condition.DISABLED not in conditions(play(FINE, *[LOST, LOST, FINE] * 5))
    assert Condition.DISABLED not in conditions(play(FULLER, FULLER, LOST))


def test_a_fatal_xid_of_a_lost_device_does_not_count_again_when_it_answers() -> None:
    struck_while_lost = replace(LOST, xid_counts={79: 1})
    states = play(FINE, struck_while_lost, *[xids(x79=1)] * 120)
    assert states[1].condition is Condition.DISABLED
    assert states[-1].condition is Condition.HEALTHY


def test_an_old_xid_is_not_met_twice_not_even_when_the_device_was_lost_meanwhile() -> None:
    before = play(xids(x63=1), xids(x63=1))[-1]
    after = step(before, replace(LOST, xid_counts={63: 1}), RULE, 5 * SECOND)
    assert step(after, xids(x63=1), RULE, 6 * SECOND).reason == "the GPU does not answer"


readings = st.builds(
    DeviceReading,
    st.just(DEVICE),
    lost=st.booleans(),
    sm_activity_ratio=st.none() | st.floats(0, 1),
    sm_activity_source=st.sampled_from(["gpm", "utilization"]),
    memory_used_bytes=st.none() | st.integers(0, 100),
    sm_clock_hertz=st.none() | st.floats(1e8, 3e9),
    xid_counts=st.dictionaries(st.sampled_from([13, 31, 48, 63, 79, 999]), st.integers(0, 3)),
)


@given(st.lists(readings, min_size=1, max_size=60))
def test_it_never_gets_better_before_the_hold_off_is_over_and_never_by_more_than_there_is(
    sequence: list[DeviceReading],
) -> None:
    before: HealthState | None = None
    for second, reading in enumerate(sequence):
        now = second * SECOND
        after = step(before or HealthState(), reading, RULE, now)
        assert after.relapses >= 0
        assert step(after, reading, RULE, now).condition is after.condition
        if before and ORDER.index(after.condition) < ORDER.index(before.condition) and before.hold_until_ns:
            assert now >= before.hold_until_ns
        before = after


@given(st.lists(readings, max_size=60))
def test_without_bounds_only_lost_devices_and_xids_count(sequence: list[DeviceReading]) -> None:
    harmless = [replace(reading, lost=False, xid_counts={31: 1}) for reading in sequence]
    assert set(conditions(play(*harmless, rule=DEFAULT_HEALTH))) <= {Condition.HEALTHY}


shares = st.builds(Share, st.floats(0.05, 1.0), st.just(10**6), st.just("slack"))
FLOOR = 0.05


@given(shares, st.sampled_from(Condition), st.none() | st.floats(0.05, 1.0))
def test_health_only_ever_lowers_a_share_and_never_below_the_floor(
    share: Share, condition: Condition, before: float | None
) -> None:
    health = view(HealthState(condition, since_ns=0))
    limited = limit(share, health, before, FLOOR)
    assert FLOOR <= limited.ratio <= share.ratio
    if condition is Condition.HEALTHY:
        assert limited == share
    else:
        assert limited.ratio <= (FLOOR if before is None else max(before, FLOOR))
        assert limited.exhausted is health.must_leave
    if health.must_leave:
        assert limited.ratio == FLOOR


def test_a_device_without_a_health_limits_nothing() -> None:
    share = Share(0.7, 1, "slack")
    assert limit(share, None, None, FLOOR) == share
    assert worst([]) is None


def policy(text: str = "") -> Policy:
    return parse("version: 1\n" + text, "p")


def look(policy: Policy, *devices: DeviceReading) -> dict[DeviceUuid, HealthView]:
    return SysMonitor().look(Snapshot(0, 0, 0, devices), policy)


def test_bounds_are_those_of_the_first_entry_that_names_the_device() -> None:
    text = "health:\n  - {devices: GPU-1, unhealthy: {memory: 40%}}\n  - {unhealthy: {memory: 10%, sm_clock: 1500}}\n"
    other = replace(FINE, device=replace(DEVICE, uuid=DeviceUuid("GPU-2")), memory_used_bytes=5, sm_clock_hertz=1.4e9)
    found = look(policy(text), replace(FINE, memory_used_bytes=30), other)
    assert [one.state for one in found.values()] == [Condition.HEALTHY, Condition.UNHEALTHY]
    assert found[DeviceUuid("GPU-2")].reason == "SM clock 1400 MHz under 1500 MHz at work"


def test_an_instance_is_no_better_than_its_gpu() -> None:
    instance = replace(FINE, device=replace(DEVICE, uuid=DeviceUuid("MIG-1"), parent=DEVICE.uuid))
    found = look(policy(), xids(x79=1), instance)
    assert found[DeviceUuid("MIG-1")].must_leave


def test_another_policy_begins_with_what_is_known_of_the_devices() -> None:
    monitor, struck = SysMonitor(), (xids(x63=1),)
    monitor.look(Snapshot(0, 0, 0, struck), policy())
    (health,) = monitor.look(
        Snapshot(31 * SECOND, 0, 0, struck), policy("health: [{unhealthy: {memory: 90%}}]\n")
    ).values()
    assert health.may_grow


def test_a_snapshot_that_is_the_latest_for_long_is_one_look_at_the_devices() -> None:
    monitor = SysMonitor()
    for at_ns in (0, 0, 0, 10 * SECOND):
        (health,) = monitor.look(Snapshot(at_ns, 0, 0, (LOST,)), policy()).values()
        assert health.must_leave is (at_ns > 0)


def test_the_published_health_has_its_age_and_the_rest_of_its_hold_off() -> None:
    monitor = SysMonitor()
    views = monitor.look(Snapshot(0, 0, 0, (xids(x63=1),)), policy())
    (health,) = published(views, 10 * SECOND).values()
    assert (health.state, health.seconds, health.hold_seconds) == ("unhealthy", 10.0, 20.0)


def test_the_table_of_xids_knows_the_fatal_ones_from_the_programs_own() -> None:
    assert {xid for xid in XIDS if severity_of(xid) is XidSeverity.FATAL} >= {48, 64, 79, 95, 119}
    assert {xid for xid in XIDS if severity_of(xid) is XidSeverity.APPLICATION} >= {13, 31, 43, 45, 94}
    assert severity_of(12345) is XidSeverity.DEVICE
