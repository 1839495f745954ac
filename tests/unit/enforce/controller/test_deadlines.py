# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether deadlines can be met, beside what really happens to them; and what is reported of periodic containers."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ContainerKey, ProcessId
from agent.probes.abi import SERVED, Periodic, ProcessKey
from enforce.controller.deadlines import DeadlineMonitor, OfflineWork, RequestMeter, Task, admissions, load_ratio
from enforce.controller.decision import DecisionInputs, decide
from enforce.policy.matching import Match
from enforce.policy.model import Limits, OfflineRule, OnlineRule, PeriodicRule, Role, Slo, Tuning
from enforce.workloads import Workload
from tests.support.decisions import GPU, workload_of

MS = 1_000_000
TUNING = Tuning(100 * MS, 20 * MS, MS // 5, 2000 * MS, 5000 * MS)
CAMERA, RADAR, BATCH = ContainerKey("c:camera"), ContainerKey("c:radar1"), ContainerKey("c:batch-1")
PERIODIC = PeriodicRule("camera", Match(), 40 * MS, 30 * MS, 200 * MS)
OFFLINE = OfflineRule("batch", Match(), "headroom", None, 1.0, Limits(None, 0.05, 200 * MS, None), ("gate", "pace"))
ONLINE = OnlineRule("chat", Match(), Slo("gpu_wait", 0.99, 10 * MS, 10_000 * MS, 20))


class Records:
    """The kernel's map `periodics`."""

    def __init__(self) -> None:
        self.of: dict[ProcessId, Periodic] = {}

    def get(self, key: ProcessKey) -> Periodic | None:
        return self.of.get(key.id())

    def delete(self, key: ProcessKey) -> None:
        self.of.pop(key.id(), None)

    def end(self, process: ProcessId, *lengths_ns: int, late_ns: int = 0) -> None:
        """Requests that had the device for so long; each of them was so late."""
        record = self.of.setdefault(process, Periodic())
        for length_ns in lengths_ns:
            record.served_ns[record.served % SERVED] = length_ns
            record.served += 1
            record.requests += 1
            record.misses += late_ns > 0
            record.worst_late_ns = max(record.worst_late_ns, late_ns)


def any_map(records: Records) -> Any:
    return records


def process_of(workload: Workload) -> ProcessId:
    return workload.members[0].process.id


def inputs_of(*workloads: Workload) -> DecisionInputs:
    return DecisionInputs({one.container.key: one for one in workloads}, {}, {GPU: 0})


def misses(tasks: list[Task], offsets: list[int], until_ns: int) -> int:
    """Step by step: requests begin once a period, and run one at a time, the earliest deadline first."""
    begins = sorted(
        (offset + number * task.period_ns, index)
        for index, (task, offset) in enumerate(zip(tasks, offsets, strict=True))
        for number in range((until_ns - offset) // task.period_ns)
    )
    now_ns = missed = 0
    waiting: list[tuple[int, int]] = []
    while begins or waiting:
        if not waiting:
            now_ns = max(now_ns, begins[0][0])
        while begins and begins[0][0] <= now_ns:
            begin_ns, index = begins.pop(0)
            waiting.append((begin_ns + tasks[index].deadline_ns, index))
        waiting.sort()
        deadline_ns, index = waiting.pop(0)
        now_ns += int(tasks[index].cost_ns)
        missed += now_ns > deadline_ns
    return missed


@st.composite
def task_sets(draw: st.DrawFn) -> tuple[list[Task], list[int]]:
    """Some tasks in small numbers, and when the first request of each begins."""
    tasks, offsets = [], []
    for _ in range(draw(st.integers(1, 5))):
        period = draw(st.integers(4, 40))
        deadline = draw(st.integers(2, period))
        tasks.append(Task(draw(st.integers(1, max(1, deadline // 2))), deadline, period))
        offsets.append(draw(st.integers(0, period)))
    return tasks, offsets


@given(task_sets())
def test_what_is_admitted_misses_no_deadline_however_the_requests_begin(drawn: tuple[list[Task], list[int]]) -> None:
    tasks, offsets = drawn
    if load_ratio(tasks) <= 1:
        assert misses(tasks, offsets, 2000) == 0


@pytest.mark.parametrize("count", range(1, 6))
def test_tasks_of_equal_deadlines_that_begin_together_are_admitted_exactly_if_they_fit(count: int) -> None:
    tasks = [Task(20, 60, 60)] * count
    assert (load_ratio(tasks) <= 1) == (misses(tasks, [0] * count, 600) == 0)


def test_with_equal_deadlines_the_device_can_be_filled() -> None:
    assert load_ratio([Task(10, 100, 100)] * 10) == pytest.approx(1.0)


def test_a_longer_request_that_has_just_begun_counts_for_a_shorter_deadline() -> None:
    short, long = Task(2, 10, 20), Task(10, 100, 100)
    assert load_ratio([short]) == pytest.approx(0.2)
    assert load_ratio([short, long]) == pytest.approx(0.2 + 1.0)
    assert misses([short, long], [1, 0], 100) == 1


def test_offline_work_that_is_queued_counts_for_each_deadline() -> None:
    assert load_ratio([Task(2, 10, 20)], OfflineWork(queued_ns=3, share_ratio=0.25)) == pytest.approx(0.75)


def test_requests_are_counted_over_the_processes_of_a_container_and_after_their_end() -> None:
    records, camera = Records(), workload_of(CAMERA, Role.PERIODIC, PERIODIC)
    meter = RequestMeter(any_map(records))
    first = process_of(camera)
    records.end(first, 5 * MS, 6 * MS, late_ns=2 * MS)
    assert meter.read({CAMERA: camera}, 0)[CAMERA].misses == 2
    member = camera.members[0]
    second = replace(member, process=replace(member.process, id=ProcessId(99, 1)))
    again = replace(camera, members=(second,))
    records.end(ProcessId(99, 1), 5 * MS)
    found = meter.read({CAMERA: again}, 100 * MS)[CAMERA]
    assert (found.ended, found.misses, found.worst_late_ns) == (3, 2, 2 * MS)
    assert first not in records.of


def test_what_a_request_takes_is_the_longest_of_the_last_ten_seconds_and_unknown_after_too_few() -> None:
    records, camera = Records(), workload_of(CAMERA, Role.PERIODIC, PERIODIC)
    meter, process = RequestMeter(any_map(records)), process_of(camera)
    records.end(process, 9 * MS, 5 * MS)
    assert meter.read({CAMERA: camera}, 0)[CAMERA].cost_ns == {}
    records.end(process, 5 * MS, 5 * MS, 5 * MS)
    assert meter.read({CAMERA: camera}, MS)[CAMERA].cost_ns == {process: 9 * MS}
    records.end(process, *[4 * MS] * SERVED)
    assert meter.read({CAMERA: camera}, 11_000 * MS)[CAMERA].cost_ns == {process: 4 * MS}


def test_one_stall_in_a_hundred_requests_is_not_what_they_take() -> None:
    records, camera = Records(), workload_of(CAMERA, Role.PERIODIC, PERIODIC)
    meter, process = RequestMeter(any_map(records)), process_of(camera)
    for step in range(13):
        records.end(process, *[4 * MS] * 8, *([90 * MS] if step == 5 else []))
        found = meter.read({CAMERA: camera}, step * 100 * MS)[CAMERA]
    assert found.cost_ns == {process: 4 * MS}


def admitted(*workloads: Workload, lengths_ns: int = 5 * MS) -> Any:
    """The admission of the device, when each periodic process has had requests of that length."""
    records, inputs = Records(), inputs_of(*workloads)
    for one in workloads:
        if one.classification.role is Role.PERIODIC:
            records.end(process_of(one), *[lengths_ns] * 8)
    requests = RequestMeter(any_map(records)).read(inputs.workloads, 0)
    return admissions(inputs, decide(inputs, {}, TUNING, 0).levels, requests)[GPU]


def test_containers_on_a_device_are_admitted_up_to_its_load() -> None:
    camera, radar = workload_of(CAMERA, Role.PERIODIC, PERIODIC), workload_of(RADAR, Role.PERIODIC, PERIODIC)
    alone, both = admitted(camera, lengths_ns=10 * MS), admitted(camera, radar, lengths_ns=20 * MS)
    assert (alone.load_ratio, both.load_ratio) == (pytest.approx(1 / 3), pytest.approx(4 / 3))
    assert alone.text.startswith("admitted: a load of 0.33")
    assert both.text.startswith("not admitted: a load of 1.33")


def test_offline_work_that_waits_at_the_gate_is_in_the_load_and_other_work_makes_it_unknown() -> None:
    camera, batch = workload_of(CAMERA, Role.PERIODIC, PERIODIC), workload_of(BATCH, Role.OFFLINE, OFFLINE)
    queue, floor, launch = 0.05, 0.05, 0.1 / 200  # of the time: one launch of 0.1 ms after each longest pause
    assert admitted(camera, batch).load_ratio == pytest.approx(5 / 30 + queue + floor + launch)
    free = workload_of(BATCH, Role.OFFLINE, replace(OFFLINE, ladder=("pace",)))
    assert (admitted(camera, free).load_ratio, "stops at no gate" in admitted(camera, free).text) == (None, True)
    chat = workload_of(BATCH, Role.ONLINE, ONLINE)
    assert (admitted(camera, chat).load_ratio, "waits for no turn" in admitted(camera, chat).text) == (None, True)


def test_without_enforcement_nothing_is_known_of_requests() -> None:
    camera = workload_of(CAMERA, Role.PERIODIC, PERIODIC)
    monitor = DeadlineMonitor(any_map(Records()), enforced=False)
    status = monitor.step(inputs_of(camera), {}, 0)[CAMERA]
    assert (status.period_seconds, status.deadline_seconds) == (0.04, 0.03)
    assert (status.requests_total, status.misses_total, status.load_ratio) == (None, None, None)
    assert "unknown: too few requests of camera have ended" in monitor.texts[CAMERA]


def test_what_changes_notably_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    camera, records = workload_of(CAMERA, Role.PERIODIC, PERIODIC), Records()
    monitor, process = DeadlineMonitor(any_map(records), enforced=True), process_of(camera)
    with caplog.at_level(logging.INFO, "enforce.controller.deadlines"):
        for step, length_ns in enumerate((12 * MS, 12 * MS, 12.1 * MS, 20 * MS, 40 * MS)):
            records.end(process, *[int(length_ns)] * SERVED)
            monitor.step(inputs_of(camera), {}, step * 20_000 * MS)
    said = [(record.levelname, record.getMessage().partition(": ")[2].partition(" on")[0]) for record in caplog.records]
    assert said == [
        ("INFO", "admitted: a load of 0.40"),
        ("INFO", "admitted: a load of 0.67"),
        ("WARNING", "not admitted: a load of 1.33"),
    ]
    assert "0 of 80 were late; not admitted" in monitor.texts[CAMERA]


def test_offline_work_beside_periodic_containers_alone_is_gated_and_has_a_short_queue() -> None:
    camera, batch = workload_of(CAMERA, Role.PERIODIC, PERIODIC), workload_of(BATCH, Role.OFFLINE, OFFLINE)
    levels = {
        target.container: level for target, level in decide(inputs_of(camera, batch), {}, TUNING, 0).levels.items()
    }
    assert (levels[CAMERA].deadline_ns, levels[CAMERA].max_pause_ns) == (30 * MS, 200 * MS)
    assert levels[CAMERA].slows
    assert (levels[BATCH].gate, levels[BATCH].pace, levels[BATCH].soft) == (True, True, False)
    assert (levels[BATCH].share_ratio, levels[BATCH].max_queued_ns) == (1.0, 30 * MS * 0.05)
    assert not decide(inputs_of(batch), {}, TUNING, 0).levels
