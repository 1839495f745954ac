# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Waiting, on a clock that only sleeping moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clocks import SleepClock
from tools.harness import wait
from tools.harness.wait import poll, until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    made = SleepClock(100.0)
    monkeypatch.setattr(wait, "time", made)
    return made


def values(*given: object) -> Iterator[object]:
    yield from given
    while True:
        yield given[-1]


def test_the_first_true_value_is_returned_without_a_pause(clock: SleepClock) -> None:
    assert until(lambda: "here", "it") == "here"
    assert clock.pauses == []


def test_pauses_double_from_a_millisecond_to_the_longest_step(clock: SleepClock) -> None:
    given = values(0, 0, 0, 0, 0, 0, 7)
    assert until(lambda: next(given), "it", step_seconds=0.005) == 7
    assert clock.pauses == [0.001, 0.002, 0.004, 0.005, 0.005, 0.005]


def test_a_step_below_a_millisecond_is_kept(clock: SleepClock) -> None:
    given = values(0, 0, 1)
    until(lambda: next(given), "it", step_seconds=0.0)
    assert clock.pauses == [0.0, 0.0]


def test_after_the_deadline_the_error_names_what_was_awaited_and_the_last_value(clock: SleepClock) -> None:
    with pytest.raises(TimeoutError, match=r"^waited 2 s in vain for three rows; the last value was \[\]$"):
        until(list, "three rows", 2)
    assert 102 <= clock.now < 102.1


@pytest.mark.parametrize("nothing", [False, None])
def test_a_last_value_without_information_is_left_out(clock: SleepClock, nothing: object) -> None:
    with pytest.raises(TimeoutError, match=r"in vain for a row$"):
        until(lambda: nothing, "a row", 1)


def test_what_is_looked_up_for_the_error_is_looked_up_then_only(clock: SleepClock) -> None:
    looks: list[float] = []

    def log() -> str:
        looks.append(clock.now)
        return "a row; the log: empty"

    with pytest.raises(ValueError, match="a row; the log: empty"):
        until(lambda: False, log, 1, error=ValueError)
    assert len(looks) == 1


def test_an_exception_of_the_condition_ends_the_wait(clock: SleepClock) -> None:
    with pytest.raises(ZeroDivisionError):
        until(lambda: 1 // 0, "it")
    assert clock.pauses == []


def test_it_looks_once_more_when_the_machine_stalled_past_the_deadline(clock: SleepClock) -> None:
    given = values(0, 1)
    clock.stall_seconds = 1000
    assert until(lambda: next(given), "it", 5) == 1


def test_poll_returns_the_last_value_where_none_was_true(clock: SleepClock) -> None:
    assert poll(lambda: 0, 1) == 0
    assert poll(lambda: "x", 1) == "x"
