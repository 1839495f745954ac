# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When a process that was stopped at a copy may go on, and how fast a link is taken to be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import DeviceReading, DeviceUuid, ProcessId
from agent.probes.abi import (
    LINK_LEAD_NS,
    LINK_LONGEST_NS,
    LINK_QUEUE_NS,
    LINK_SETTLE_NS,
    LINKS,
    MOST_COPIERS,
    PAUSE_COPY,
    RULE_COPIES,
    RULE_SHORT,
    SLOTS,
    WEIGHT_ONE,
    Copier,
    Gate,
    Link,
    Pause,
    ProcessKey,
    Rule,
)
from enforce.actuators.launch.pace import PAYLOAD_RATIO, Links, level_of, link_speed, rule_of
from enforce.actuators.launch.resume import HeldCopy, ResumeSchedule, let_through, link_wait_ns
from enforce.model import CopyLevel, Level, Target
from enforce.policy.model import Pcie
from tests.support.snapshots import device

MS = 1_000_000
NOW = 1000 * MS
GPU = DeviceUuid("GPU-1")
OWN, OTHER = 7, 9
COPY = HeldCopy(0, OWN, WEIGHT_ONE, MS // 2, beside_online=False)


def link_with(own_ns: int, other_ns: int | None, *, other_weight: int = WEIGHT_ONE) -> Link:
    """Virtual times; the other one copies now. The copy that waits is charged."""
    link = Link(bytes_per_second=1)
    link.copiers[0] = Copier(OWN, WEIGHT_ONE, own_ns + COPY.link_ns, NOW)
    if other_ns is not None:
        link.copiers[1] = Copier(OTHER, other_weight, other_ns, NOW + MS)
    return link


def pause(at_ns: int, *, flags: int = RULE_COPIES, tgid: int = 1) -> Pause:
    rule = Rule(flags=flags, max_pause_ns=20 * MS, group=OWN, weight=WEIGHT_ONE)
    return Pause(reason=PAUSE_COPY, process=ProcessKey(tgid, 1), at_ns=at_ns, estimate_ns=COPY.link_ns, rule=rule)


def schedule() -> ResumeSchedule:
    return ResumeSchedule([Gate() for _ in range(SLOTS)], MS, 0, [Link() for _ in range(LINKS)])


def test_a_process_at_a_copy_goes_on_when_no_online_copy_is_under_way() -> None:
    it = schedule()
    it.links[0].online_until_ns = NOW + 3 * MS
    it.add(pause(NOW))
    assert it.due(NOW + 2 * MS) == []
    assert it.links[0].waiting == 1
    assert it.next_ns(NOW + 2 * MS) == NOW + 3 * MS
    it.links[0].online_until_ns = NOW + 2 * MS  # its wait has returned
    assert [due.stop.process for due in it.due(NOW + 2 * MS)] == [ProcessId(1, 1)]
    assert it.links[0].waiting == 0


def test_no_copy_waits_longer_than_the_longest_pause() -> None:
    it = schedule()
    it.links[0].online_until_ns = 1 << 62
    it.add(pause(NOW))
    assert it.due(NOW + 20 * MS - 1) == []
    assert len(it.due(NOW + 20 * MS)) == 1


def test_of_two_that_wait_beside_an_online_container_one_goes_on_and_the_other_when_its_copy_is_over() -> None:
    it = schedule()
    for tgid in (1, 2):
        it.add(pause(NOW, flags=RULE_COPIES | RULE_SHORT, tgid=tgid))
    assert len(it.due(NOW)) == 1
    assert it.links[0].queued_until_ns == NOW + COPY.link_ns
    assert it.due(NOW + COPY.link_ns // 10) == []
    assert len(it.due(NOW + COPY.link_ns)) == 1


def test_a_container_that_is_hardly_ahead_of_the_one_that_had_least_goes_on() -> None:
    assert link_wait_ns(link_with(10 * MS, 10 * MS), COPY, NOW) == 0
    assert link_wait_ns(link_with(10 * MS + LINK_LEAD_NS, 10 * MS), COPY, NOW) > 0
    assert link_wait_ns(link_with(10 * MS + LINK_LEAD_NS // 4, 10 * MS), COPY, NOW) == 0


def test_a_container_that_does_not_copy_now_makes_no_other_wait() -> None:
    link = link_with(500 * MS, 0)
    link.copiers[1].until_ns = NOW
    assert link_wait_ns(link, COPY, NOW) == 0


@given(own=st.integers(0, 1 << 60), other=st.integers(0, 1 << 60), weight=st.integers(1, 1_000_000))
def test_a_wait_is_never_negative_and_looks_again_soon(own: int, other: int, weight: int) -> None:
    waits = link_wait_ns(link_with(own, other, other_weight=weight), COPY, NOW)
    assert 0 <= waits <= MS
    assert link_wait_ns(link_with(own, None), COPY, NOW) == 0


def test_what_copies_claim_makes_others_wait_for_a_second_and_one_copy_at_most() -> None:
    link = link_with(0, 0)
    huge = replace(COPY, link_ns=600_000 * MS)
    for _ in range(10):
        let_through(link, huge, NOW)
    assert link.queued_until_ns <= NOW + LINK_LONGEST_NS + huge.link_ns
    let_through(link, COPY, NOW)
    assert link.queued_until_ns <= NOW + LINK_LONGEST_NS + COPY.link_ns


def test_levels_are_read_back_as_they_were_written() -> None:
    target = Target(ProcessId(1, 1), "c", (0,), 0)  # type: ignore[arg-type]
    for copies in (None, CopyLevel(), CopyLevel(3, 250, beside_online=True), CopyLevel(9, 1_000_000)):
        level = Level(share_ratio=0.5, max_pause_ns=5, copies=copies)
        assert level_of(rule_of(target, level)) == level
        assert level.slows == (copies is not None)
        assert not replace(level, online=True).slows


def test_the_speed_of_a_link_is_the_policys_or_a_part_of_what_nvml_says() -> None:
    gpu = device(0, GPU)
    assert gpu.pcie_bytes_per_second is not None
    assert link_speed(Pcie(True), gpu) == round(PAYLOAD_RATIO * gpu.pcie_bytes_per_second)
    assert link_speed(Pcie(True, 12_000_000_000), gpu) == 12_000_000_000
    assert link_speed(Pcie(True), replace(gpu, pcie_bytes_per_second=None)) is None


def test_both_directions_of_a_devices_slot_get_its_speed_and_a_device_that_left_none() -> None:
    shared = [Link() for _ in range(LINKS)]
    gpu = device(0, GPU)
    Links(shared).set_speeds(Pcie(True, 5), [DeviceReading(gpu)], {GPU: 3})
    assert [index for index, link in enumerate(shared) if link.bytes_per_second == 5] == [6, 7]
    Links(shared).set_speeds(Pcie(True, 5), [], {})
    assert not any(link.bytes_per_second for link in shared)


def test_the_kernel_side_has_the_same_bounds() -> None:
    source = (Path(__file__).parents[5] / "bpf" / "pcie.h").read_text()
    numbers = dict(re.findall(r"^#define (\w+) (\d+)(?:ull)?\b", source, re.MULTILINE))
    assert int(numbers["LINK_LEAD_NS"]) == LINK_LEAD_NS
    assert int(numbers["LINK_QUEUE_NS"]) == LINK_QUEUE_NS
    assert int(numbers["LINK_SETTLE_NS"]) == LINK_SETTLE_NS
    assert int(numbers["LINK_LONGEST_NS"]) == LINK_LONGEST_NS
    assert int(numbers["MOST_COPIERS"]) == MOST_COPIERS
    assert int(numbers["WEIGHT_ONE"]) == WEIGHT_ONE
