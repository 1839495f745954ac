# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the status page remembers: five minutes, a point a second, of the containers there now."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerUsage, DeviceUuid, EnforcementStatus, Snapshot
from agent.exporters.status_page.history import HEIGHT, SECONDS, WIDTH, GraphMetric, GraphSeries, Ring, graph
from tests.support.snapshots import GPU_0, container, rich_snapshot, usage

TRAINER = GraphSeries(GraphMetric.SM, "c2", GPU_0)
STEP = re.compile(r"(M?)(\d+(?:\.\d)?) (\d+(?:\.\d)?)|h0")


def at(seconds: float, ratio: float | None = 0.5, *names: str) -> Snapshot:
    used = tuple(ContainerUsage(container(name, name), (usage(GPU_0, ratio, 1),), ()) for name in names or ("c2",))
    return replace(rich_snapshot(), at_ns=int(seconds * NS_PER_SECOND), containers=used)


def test_the_points_are_the_ticks_with_their_age() -> None:
    ring = Ring()
    for second in (1, 2, 4):
        ring.note(at(second, second / 10))
    assert [(age, round(value, 6)) for age, value in ring.points(TRAINER)] == [(3.0, 0.1), (2.0, 0.2), (0.0, 0.4)]
    assert ring.seconds() == 3.0


def test_ten_ticks_a_second_are_a_point_a_second() -> None:
    ring = Ring()
    for tick in range(10, 101):
        ring.note(at(tick / 10))
    assert len(ring.points(TRAINER)) == 10


def test_five_minutes_are_kept_however_long_it_runs() -> None:
    ring = Ring()
    for second in range(1, 1000):
        ring.note(at(second))
    ages = [age for age, _ in ring.points(TRAINER)]
    assert (len(ages), ages[0], ages[-1]) == (SECONDS, SECONDS - 1, 0)
    slow = Ring()
    for minute in range(1, 20):
        slow.note(at(60 * minute))
    assert [age for age, _ in slow.points(TRAINER)] == [300, 240, 180, 120, 60, 0]


def test_what_was_unknown_is_a_gap_and_never_0() -> None:
    ring = Ring()
    for second, ratio in ((1, 0.1), (2, None), (3, 0.3)):
        ring.note(at(second, ratio))
    values = [value for _, value in ring.points(TRAINER)]
    assert math.isnan(values[1])
    assert [round(value, 6) for value in (values[0], values[2])] == [0.1, 0.3]


def test_a_container_that_is_gone_is_forgotten_and_memory_does_not_grow_with_those_that_ever_were() -> None:
    ring = Ring()
    for second in range(1, 200):
        ring.note(at(second, 0.5, *(f"job-{second}-{number}" for number in range(20))))
    assert ring.points(GraphSeries(GraphMetric.SM, "job-1-0", GPU_0)) == []
    assert len(ring._values) < 20 + 2 * len(rich_snapshot().devices) + 1


def test_a_device_that_is_gone_is_forgotten_and_those_that_ever_were_take_no_memory() -> None:
    ring, one = Ring(), rich_snapshot().devices[0]
    for second in range(1, 200):
        passing = replace(one, device=replace(one.device, uuid=DeviceUuid(f"MIG-{second}")))
        ring.note(replace(at(second), devices=(one, passing)))
    assert ring.points(GraphSeries(GraphMetric.SM, device="MIG-1")) == []
    assert len(ring.points(GraphSeries(GraphMetric.SM, device=GPU_0))) == 199
    assert {series.device for series in ring._values} == {"", GPU_0, "MIG-199"}


def test_a_reloaded_policy_leaves_a_gap_in_the_latency_and_not_an_empty_graph() -> None:
    ring, latency = Ring(), GraphSeries(GraphMetric.LATENCY, "c2")
    statuses = {"c2": EnforcementStatus("online", "chat", 0.004, 0.99, 0.050)}
    for second in range(1, 4):
        ring.note(replace(at(second), enforcement={} if second == 2 else statuses))  # type: ignore[arg-type]
    assert [math.isnan(value) for _, value in ring.points(latency)] == [False, True, False]


def test_a_graph_of_nothing_is_none() -> None:
    assert graph([], "") is None
    assert graph([(1.0, math.nan)], "") is None


def test_a_line_breaks_off_where_nothing_was_known() -> None:
    drawn = graph([(30, 0.0), (20, 1.0), (10, math.nan), (0, 0.5)], "sm", level=0.5)
    assert drawn is not None
    assert drawn.line == "M0 24 40 0 M120 12 h0"
    assert drawn.level == f"M0 12H{WIDTH}"


@given(
    st.lists(st.tuples(st.floats(0, 300), st.floats(0, 1e9) | st.just(math.nan)), min_size=1, max_size=50),
    st.none() | st.just(1.0),
    st.none() | st.floats(0, 1e9),
)
def test_a_graph_stays_in_its_box_and_is_nothing_but_path_data(
    points: list[tuple[float, float]], top: float | None, level: float | None
) -> None:
    points.sort(reverse=True)
    drawn = graph(points, "", top, level)
    if drawn is None:
        return
    steps = STEP.findall(drawn.line)
    assert STEP.sub("", drawn.line).strip() == ""
    places = [(float(x), float(y)) for _, x, y in steps if x]
    assert len(places) == sum(not math.isnan(value) for _, value in points)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


@pytest.mark.parametrize("seconds", [5, 30, 300])
def test_a_young_graph_is_not_stretched_and_an_old_one_fills_its_width(seconds: int) -> None:
    drawn = graph([(float(seconds - n), 0.5) for n in range(seconds + 1)], "")
    assert drawn is not None
    left = float(drawn.line[1:].split()[0])
    assert left == (100.0 if seconds == 5 else 0.0)
