# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last minute and its graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.model import ContainerKey, Snapshot
from agent.core.text import ASCII, UTF8
from agent.tui.cells import GPU_THRESHOLDS, graph
from agent.tui.header import device_lines
from agent.tui.history import RecentSeries, SnapshotHistory
from agent.tui.plain import fresh
from agent.tui.recording import opened, recorded
from tests.support.snapshots import GPU_0, GPU_1, rich_snapshot

SECOND = 1_000_000_000


def at(seconds: float, ratio: float = 0.5) -> Snapshot:
    """A tick in which the first device was so busy."""
    snapshot = rich_snapshot()
    first = replace(snapshot.devices[0], sm_activity_ratio=ratio)
    return replace(snapshot, at_ns=int(seconds * SECOND), devices=(first, *snapshot.devices[1:]))


def busy(history: SnapshotHistory) -> RecentSeries:
    return history.device(GPU_0, lambda reading: reading.sm_activity_ratio)


def test_a_minute_is_kept_and_no_more() -> None:
    history = SnapshotHistory()
    for second in range(100):
        history.add(at(second, second / 100))
    assert [when for when, _ in busy(history).points] == [second * SECOND for second in range(40, 100)]
    assert busy(history).most == pytest.approx(0.99)


def test_ticks_that_are_close_together_are_thinned() -> None:
    history = SnapshotHistory()
    for tenth in range(1000):
        history.add(at(tenth / 10))
    assert len(history.ticks) <= 121
    assert history.ticks[-1].at_ns == 99_900_000_000


def test_going_back_begins_the_history_again() -> None:
    history = SnapshotHistory()
    for second in (10, 11, 5):
        history.add(at(second))
    assert len(history.ticks) == 1


def test_a_snapshot_that_is_shown_again_changes_nothing() -> None:
    history = SnapshotHistory()
    for second in (10, 11, 11):
        history.add(at(second))
    assert len(history.ticks) == 2


def test_an_agent_that_is_slower_than_gputop_has_its_minute_and_is_recorded_once(tmp_path: Path) -> None:
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def latest() -> Snapshot:
        return replace(at(now[0] // 5 * 5), interval_ns=5 * SECOND)

    history = SnapshotHistory()
    with recorded(fresh(latest, 1.0, now=lambda: now[0], wait=wait), tmp_path / "gpu.jsonl") as source:
        while now[0] < 30:
            history.add(source())
            wait(1.0)
    seconds = [second * SECOND for second in range(0, 30, 5)]
    assert [tick.at_ns for tick in history.ticks][: len(seconds)] == seconds
    with opened(tmp_path / "gpu.jsonl") as recording:
        times = [recording[index].at_ns for index in range(len(recording))]
    assert times == sorted(set(times))


def test_a_copy_stays_as_it_is() -> None:
    history = SnapshotHistory()
    for tenth in range(0, 100, 3):
        history.add(at(tenth / 10))
    copy, ticks = history.copy(), list(history.ticks)
    history.add(at(11))
    assert list(copy.ticks) == ticks


def test_a_container_has_the_sum_of_its_devices() -> None:
    history = SnapshotHistory()
    history.add(rich_snapshot())
    assert history.container(ContainerKey("c1"), lambda moment: moment.sm_ratio).points[0][1] == pytest.approx(0.35)
    assert history.container(ContainerKey("none"), lambda moment: moment.sm_ratio).points[0][1] is None
    assert history.device(GPU_1, lambda reading: reading.power_watts).points[0][1] is None


def test_the_newest_is_at_the_right_and_short_gaps_are_bridged() -> None:
    points = ((0, 0.1), (30 * SECOND, 0.3), (58 * SECOND, 0.5), (60 * SECOND, 0.7))
    columns = RecentSeries(points, 60 * SECOND, 3 * SECOND).columns(60)
    assert columns[-1] == 0.7
    assert columns[-3:-1] == [0.5, 0.5]
    assert columns[29:33] == [0.3, 0.3, 0.3, 0.3]
    assert columns[33] is None
    assert RecentSeries(points, 60 * SECOND, 3 * SECOND).columns(0) == []
    assert RecentSeries(points, 60 * SECOND, 3 * SECOND).columns(2) == [pytest.approx(0.3), pytest.approx(0.6)]


def test_a_graph_is_as_high_as_it_is_asked_to_be_and_nothing_is_not_unknown() -> None:
    lines = graph([None, 0.0, 0.5, 1.0, 7.0], 2, 1.0, UTF8)
    assert [line.plain for line in lines] == ["   ██", " ▁███"]
    assert [line.plain for line in graph([0.0, 0.5, 1.0], 1, 1.0, ASCII)] == [".=#"]
    assert [line.plain for line in graph([0.0, None], 1, 0.0, UTF8)] == ["▁ "]


def test_a_graph_has_the_colours_of_its_thresholds() -> None:
    (line,) = graph([0.05, 0.06, 0.5, 0.9], 1, 1.0, UTF8, GPU_THRESHOLDS)
    assert [(span.start, span.end, span.style) for span in line.spans] == [
        (0, 2, "green"),
        (2, 3, "yellow"),
        (3, 4, "red"),
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 149, 150, 200])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_devices_have_bars_and_the_last_minute_below_them(width: int, each: int) -> None:
    history = SnapshotHistory()
    history.add(rich_snapshot())
    lines = [line.plain for line in device_lines(rich_snapshot(), history, width, each, UTF8)]
    assert len(lines) == 2 * each + 1, "a lost device has one line"
    assert max(map(len, lines)) <= width
    for label in ("SM", "MEM", "PCIe", "PWR", "DISABLED"):
        assert label in lines[0]
    assert "…" not in lines[0]
    assert lines[-1].startswith("GPU 2")
    assert "LOST" in lines[-1]
