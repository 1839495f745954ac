# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Running totals, and the last figures of containers that ended."""

from __future__ import annotations

import pytest

from agent.attribution.split import Work
from agent.attribution.totals import RunningTotals
from agent.core.clock import NS_PER_SECOND
from agent.core.model import Container, ContainerKey, DeviceUuid, ProcessId, Usage

GPU = DeviceUuid("GPU-1")
MINUTE = 60 * NS_PER_SECOND


def container(name: str) -> Container:
    return Container(ContainerKey(name), name, "runc")


def add(totals: RunningTotals, name: str, launches: int) -> None:
    work = Work(ProcessId(1, 1), launches, 0.0, 0, 0, 0)
    totals.add(container(name), work, Usage(GPU, 0.5, None, None, None, None, float(launches)), 1.0)


def launches(totals: RunningTotals, now_ns: int) -> dict[str, int]:
    return {one.container.name: one.usage[0].totals.launches for one in totals.ended(now_ns)}


def test_the_last_figures_of_a_container_stay_until_they_were_scraped() -> None:
    totals = RunningTotals()
    add(totals, "job", 730)
    totals.end([container("job")], 0)
    assert launches(totals, 30 * MINUTE) == {"job": 730}
    totals.scraped(totals.ended(30 * MINUTE))
    assert launches(totals, 31 * MINUTE) == {}
    assert totals.dropped == 0


def test_a_second_scraper_has_time_to_come_by() -> None:
    totals = RunningTotals()
    add(totals, "job", 1)
    totals.end([container("job")], 0)
    totals.scraped(totals.ended(1))
    assert launches(totals, MINUTE // 2) == {"job": 1}
    assert launches(totals, 2 * MINUTE) == {}


def test_figures_that_are_not_scraped_are_dropped_after_an_hour_and_counted() -> None:
    totals = RunningTotals()
    add(totals, "job", 1)
    totals.end([container("job")], 0)
    assert launches(totals, 61 * MINUTE) == {}
    assert totals.dropped == 1


@pytest.mark.parametrize("scraped", [True, False])
def test_a_container_that_comes_back_goes_on_counting(scraped: bool) -> None:
    totals = RunningTotals()
    add(totals, "job", 5)
    totals.end([container("job")], 0)
    if scraped:
        totals.scraped(totals.ended(1))
    add(totals, "job", 6)
    assert totals.of(ContainerKey("job"))[GPU].launches == 11
    assert launches(totals, 2) == {}


def test_there_are_never_more_than_so_many_and_the_oldest_go_first() -> None:
    totals = RunningTotals(most_ended=3)
    for number in range(5):
        add(totals, f"job-{number}", number)
        totals.end([container(f"job-{number}")], number)
    assert launches(totals, 10) == {"job-2": 2, "job-3": 3, "job-4": 4}
    assert totals.dropped == 2


def test_a_container_that_never_did_anything_leaves_nothing() -> None:
    totals = RunningTotals()
    totals.end([container("idle")], 0)
    assert totals.ended(1) == ()
