# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Running totals, and the last figures of containers that ended."""

from __future__ import annotations

import pytest

from agent.attribution import Work
from agent.books import Books
from agent.clock import NS_PER_SECOND
from agent.model import Container, ContainerKey, DeviceUuid, ProcessId, Usage

GPU = DeviceUuid("GPU-1")
MINUTE = 60 * NS_PER_SECOND


def container(name: str) -> Container:
    return Container(ContainerKey(name), name, "runc")


def book(books: Books, name: str, launches: int) -> None:
    work = Work(ProcessId(1, 1), launches, 0.0, 0, 0, 0)
    books.book(container(name), work, Usage(GPU, 0.5, None, None, None, None, float(launches)), 1.0)


def launches(books: Books, now_ns: int) -> dict[str, int]:
    return {one.container.name: one.usage[0].totals.launches for one in books.ended(now_ns)}


def test_the_last_figures_of_a_container_stay_until_they_were_scraped() -> None:
    books = Books()
    book(books, "job", 730)
    books.end([container("job")], 0)
    assert launches(books, 30 * MINUTE) == {"job": 730}
    books.scraped(books.ended(30 * MINUTE))
    assert launches(books, 31 * MINUTE) == {}
    assert books.dropped == 0


def test_a_second_scraper_has_time_to_come_by() -> None:
    books = Books()
    book(books, "job", 1)
    books.end([container("job")], 0)
    books.scraped(books.ended(1))
    assert launches(books, MINUTE // 2) == {"job": 1}
    assert launches(books, 2 * MINUTE) == {}


def test_what_nobody_scrapes_is_dropped_after_an_hour_and_counted() -> None:
    books = Books()
    book(books, "job", 1)
    books.end([container("job")], 0)
    assert launches(books, 61 * MINUTE) == {}
    assert books.dropped == 1


@pytest.mark.parametrize("scraped", [True, False])
def test_a_container_that_comes_back_goes_on_counting(scraped: bool) -> None:
    books = Books()
    book(books, "job", 5)
    books.end([container("job")], 0)
    if scraped:
        books.scraped(books.ended(1))
    book(books, "job", 6)
    assert books.of(ContainerKey("job"))[GPU].launches == 11
    assert launches(books, 2) == {}


def test_there_are_never_more_than_so_many_and_the_oldest_go_first() -> None:
    books = Books(most_ended=3)
    for number in range(5):
        book(books, f"job-{number}", number)
        books.end([container(f"job-{number}")], number)
    assert launches(books, 10) == {"job-2": 2, "job-3": 3, "job-4": 4}
    assert books.dropped == 2


def test_a_container_that_never_did_anything_leaves_nothing() -> None:
    books = Books()
    books.end([container("idle")], 0)
    assert books.ended(1) == ()
