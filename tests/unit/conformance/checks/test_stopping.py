# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the records of held programs say, how results are checked, and that a broken part costs its own rows only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

from conformance.checks import item
from conformance.checks.mps.endings import gap_ms
from conformance.checks.stopping import training
from conformance.checks.stopping.timeline import Hold, Timeline, latencies_ms, median, p90
from conformance.clients import driver, holder, launcher
from conformance.host import Unavailable
from conformance.programs import torch_training
from conformance.report.model import Row, Verdict, part

MS = 1_000_000
HOLD = Hold(asked_ns=100 * MS, still_ns=101 * MS, released_ns=200 * MS, running_ns=201 * MS)


def one_by_one(number: int, steps: int) -> int:
    for _ in range(steps):
        number = (number * driver.MULTIPLIER + driver.INCREMENT) % (1 << 64)
    return number


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 64, 1000])
def test_many_steps_at_once_lead_where_one_by_one_they_lead(steps: int) -> None:
    multiplier, increment = driver.jump(steps)
    for number in (0, 1, 12345, (1 << 64) - 1):
        assert (number * multiplier + increment) % (1 << 64) == one_by_one(number, steps)


def test_a_number_that_is_one_step_short_is_a_miss() -> None:
    begun = [0, 97, 194]
    right = [one_by_one(number, 5) for number in begun]
    assert driver.misses(right, begun, 5) == 0
    assert driver.misses([right[0], one_by_one(97, 4), right[2]], begun, 5) == 1


def test_no_two_chunks_hold_the_same_and_each_is_as_long_as_asked() -> None:
    assert len({holder.pattern(number, 100) for number in range(50)}) == 50
    assert len(holder.pattern(3, 33)) == 33
    assert holder.pattern(3, 64)[:33] == holder.pattern(3, 33)


def test_the_drain_is_the_last_end_before_the_release() -> None:
    line = Timeline([], [90 * MS, 103 * MS, 148 * MS, 203 * MS])
    assert line.drain_ns(HOLD) == 48 * MS
    assert line.drained(HOLD) == 2


def test_nothing_that_ended_before_the_hold_drained() -> None:
    assert Timeline([], [90 * MS]).drain_ns(HOLD) == 0
    assert Timeline([], []).drain_ns(HOLD) == 0


def test_launches_while_held_and_the_first_after_the_release() -> None:
    line = Timeline([99 * MS, 100 * MS + 5, 150 * MS, 205 * MS, 206 * MS], [])
    assert line.launches(HOLD.still_ns, HOLD.released_ns) == 1
    assert line.resumed_ns(HOLD) == 5 * MS
    assert Timeline([150 * MS], []).resumed_ns(HOLD) is None


def test_a_rate_counts_the_ends_in_between() -> None:
    line = Timeline([], [at * MS for at in range(0, 1000, 10)])
    assert line.rate(0, 500 * MS) == pytest.approx(98)  # 49 ends after 0 and before 500 ms


def test_a_record_without_ends_is_an_empty_timeline() -> None:
    assert Timeline.of({"launched_ns": [1], "error": "CUDA_ERROR_UNKNOWN"}) == Timeline([1], ())


def test_requests_are_read_from_the_log_without_its_cut_off_end() -> None:
    found = launcher.requests("0.001000000 0.000500000 0.000400000\n0.002000000 0.0003", 1000)
    assert found == [launcher.Request(1_001_000, 1_501_000, 400_000)]
    assert (found[0].latency_ns, found[0].begun_ns) == (500_000, 1_101_000)


def test_latencies_are_those_of_the_requests_that_arrived_in_between() -> None:
    found = [launcher.Request(at * MS, (at + at // 10) * MS, MS) for at in (10, 20, 30)]
    assert latencies_ms(found, 20 * MS, 30 * MS) == [2.0]


def test_quantiles_of_nothing_are_none() -> None:
    assert p90([]) is None
    assert median([]) is None
    assert p90([float(value) for value in range(1, 101)]) == 90
    assert median([3.0, 1.0, 2.0]) == 2.0


def test_a_gap_is_the_longest_time_without_an_end() -> None:
    assert gap_ms([1 * MS, 2 * MS, 7 * MS], 0, 10 * MS) == 5.0
    assert gap_ms([], 0, 10 * MS) == 10.0
    assert gap_ms([50 * MS], 0, 10 * MS) == 10.0


def row(what: str) -> Row:
    return Row(item="x", what=what, verdict=Verdict.OK)


def test_what_a_part_cannot_have_is_skipped_and_what_came_before_stays() -> None:
    def rows() -> Iterator[Row]:
        yield row("a")
        raise Unavailable("no such thing")

    found = list(part("x", ["a", "b", "c"], rows))
    assert [(one.what, one.verdict) for one in found] == [
        ("a", Verdict.OK),
        ("b", Verdict.SKIPPED),
        ("c", Verdict.SKIPPED),
    ]
    assert found[1].note == "no such thing"


def test_a_part_that_breaks_fails_once_with_the_reason() -> None:
    def rows() -> Iterator[Row]:
        yield row("a")
        raise ValueError("of five")

    found = list(part("x", ["a", "b", "c"], rows))
    assert [one.verdict for one in found] == [Verdict.OK, Verdict.FAILED, Verdict.SKIPPED]
    assert "ValueError: of five" in found[1].note
    assert "b" in found[2].note


def test_a_part_that_breaks_after_all_its_rows_is_not_silent() -> None:
    def rows() -> Iterator[Row]:
        yield row("a")
        raise ValueError("late")

    assert [one.verdict for one in part("x", ["a"], rows)] == [Verdict.OK, Verdict.FAILED]


@pytest.mark.parametrize("name", ["stopping", "checkpoint", "mps"])
def test_no_two_rows_of_an_item_have_one_name(name: str) -> None:
    whats = item(name).what
    assert len(whats) == len(set(whats))


def judged(same: bool, steps_ms: list[int]) -> list[Row]:
    record = {"same": same, "steps_ns": [at * MS for at in steps_ms], "seconds": [0.2, 0.3]}
    return list(training.judge("stopping", record, [HOLD]))


def test_a_training_with_other_weights_differs() -> None:
    assert judged(True, [50, 90, 210, 220])[0].verdict is Verdict.OK
    assert judged(False, [50, 90, 210, 220])[0].verdict is Verdict.DIFFERS


def test_a_training_that_no_stop_met_shows_nothing() -> None:
    assert judged(True, [10, 20])[0].verdict is Verdict.FAILED


def test_steps_that_end_while_it_is_stopped_are_counted() -> None:
    same, resumes, steps = judged(True, [50, 150, 210])
    assert (resumes.figure, steps.figure, steps.verdict) == (10.0, 1, Verdict.DIFFERS)
    assert same.figure is True


def test_the_training_program_does_as_many_steps_the_second_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", MagicMock())
    monkeypatch.setattr(sys, "argv", ["torch_training.py", "0.02"])
    monkeypatch.setattr(torch_training, "WARM_SECONDS", 0.0)
    assert torch_training.main() == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["ready"]
    assert len(second["steps_ns"]) == first["steps"] > 0
