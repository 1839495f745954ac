# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Arrivals of the enforcement bench: any CSV of timestamps is read or refused with the line that is wrong."""

from __future__ import annotations

from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import SetupError
from bench.enforcement.pairs import PAIRS, TRACE
from tools.harness.arrivals import fitted, following, phase_arrivals, poisson, read_trace, write_trace


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "10\n10.5\n12\n",
        "timestamp,tokens\n10,7\n10.5,9\n12,1\n",
        "id,arrival\na,10\nb,10.5\nc,12\n",
        "# made up\n\n10.0\n10.5\n12.0\n",
        "TIMESTAMP\n2023-11-16 18:15:46.0000000\n2023-11-16 18:15:46.5000000\n2023-11-16 18:15:48.0000000\n",
        "chat,10,200\nchat,10.5,200\nchat,12,500\n",
        "12\n10\n10.5\n",
    ],
    ids=["numbers", "heading", "column by name", "comments", "dates", "no heading", "not in order"],
)
def test_timestamps_are_read_in_whichever_way_they_are_written(tmp_path: Path, text: str) -> None:
    assert read_trace(trace(tmp_path, text)) == pytest.approx([0.0, 0.5, 2.0])


def test_a_line_that_is_no_timestamp_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"trace\.csv:3: 'soon' is no timestamp: write seconds"):
        read_trace(trace(tmp_path, "arrival\n1.0\nsoon\n"))


def test_a_line_without_the_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"trace\.csv:3: '' is no timestamp"):
        read_trace(trace(tmp_path, "id,arrival\na,1.0\nb\n"))


@pytest.mark.parametrize("text", ["", "arrival\n", "1.0\n"])
def test_a_trace_without_requests_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError, match="are no trace: give a CSV"):
        read_trace(trace(tmp_path, text))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(SetupError, match="cannot read the trace"):
        read_trace(path)


@pytest.mark.parametrize("text", ["1\nnan\n2\n", "1\ninf\n"])
def test_numbers_that_are_no_time_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError):
        read_trace(trace(tmp_path, text))


@given(st.lists(st.floats(0.001, 10), min_size=50, max_size=60), st.floats(1, 10), st.floats(0.5, 4))
def test_a_fitted_trace_has_as_many_requests_as_were_asked_for(gaps: list[float], rate: float, seconds: float) -> None:
    arrivals = fitted([0.0, *accumulate(gaps)], rate, seconds)
    assert rate * seconds <= len(arrivals) < rate * seconds + 1
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert arrivals[-1] <= seconds * (1 + 1e-9)


@given(st.lists(st.floats(0.001, 10), min_size=50, max_size=60), st.floats(1, 10), st.floats(0.5, 4), st.floats(1, 100))
def test_what_settles_on_a_trace_is_the_rest_of_it_at_the_same_pace_and_then_its_beginning(
    gaps: list[float], rate: float, seconds: float, lasting: float
) -> None:
    trace = [0.0, *accumulate(gaps)]
    taken, settling = len(fitted(trace, rate, seconds)), following(trace, rate, seconds, lasting)
    factor = seconds / trace[taken]
    assert all(0 < at < lasting for at in settling)
    assert [b - a for a, b in pairwise([0.0, *settling])] == pytest.approx(
        [gap * factor for gap in islice(cycle([*gaps[taken:], *gaps[:taken]]), len(settling))], abs=1e-6
    )
    assert len(settling) >= int(lasting / (max(gaps) * factor)) - 1


def test_a_trace_whose_requests_all_come_at_once_is_refused() -> None:
    with pytest.raises(SetupError, match="has 50 requests at 1 times"):
        fitted([0.0] * 50, 10.0, 1.0)


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(
        SetupError, match=r"has 3 requests at 3 times, and 11 are needed .* give a longer one, or fewer"
    ):
        fitted([0.0, 1.0, 2.0], 10.0, 1.0)


def test_the_bench_brings_a_trace_that_is_long_enough_for_its_pairs() -> None:
    for pair in PAIRS.values():
        if pair.trace:
            assert len(fitted(read_trace(TRACE), pair.rate_per_second, 8.0 * pair.stretch)) >= 1900


@given(st.integers(0, 2**32), st.floats(10, 500))
def test_the_same_seed_gives_the_same_arrivals(seed: int, rate: float) -> None:
    first = poisson(rate, 2.0, seed)
    assert first == poisson(rate, 2.0, seed)
    assert first == sorted(first)
    assert all(0 < at < 2.0 for at in first)


@given(st.floats(0.5, 20), st.floats(0.5, 20))
def test_what_is_measured_is_the_same_however_long_everything_settled(settle: float, other: float) -> None:
    settling, measured = poisson(50, 60, 1), poisson(50, 5, 2)
    first, second = (phase_arrivals(settling, measured, seconds) for seconds in (settle, other))
    assert [at - settle for at in first if at >= settle] == pytest.approx(measured)
    assert [at - other for at in second if at >= other] == pytest.approx(measured)


def test_the_online_workload_can_read_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "arrivals"
    write_trace([0.0, 0.25, 1.0], path)
    assert path.read_text() == "0.000000000\n0.250000000\n1.000000000\n"
