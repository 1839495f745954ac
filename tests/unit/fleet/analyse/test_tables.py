# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The tables of the analysis: what they count, and that what a trace lacks is absent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.analyse import load, locality, queueing, sizes, status
from fleet.analyse.command import PARTS, analyse
from fleet.analyse.tables import Absent, Cell, Column, Table, quantile, size_of, table
from fleet.model import FleetError, Trace, TraceJob, printable

HOUR = 3600.0


def job(submit_s: float = 0.0, gpus: float = 1, duration_s: float | None = HOUR) -> TraceJob:
    return TraceJob(key=f"{submit_s}-{gpus}", submit_s=submit_s, gpus=gpus, duration_s=duration_s)


def rows(found: Table | Absent) -> dict[Cell, dict[str, Cell]]:
    """Name of a row → column → cell."""
    assert isinstance(found, Table)
    names = [column.name for column in found.columns]
    return {row[0]: dict(zip(names, row, strict=True)) for row in found.rows}


def test_sizes_are_those_of_the_paper() -> None:
    assert [size_of(job(gpus=gpus)) for gpus in (0.3, 1, 2, 4, 5, 8, 9, 128)] == [
        *("1", "1"),
        *("2–4", "2–4"),
        *("5–8", "5–8"),
        *("> 8", "> 8"),
    ]


@given(values=st.lists(st.floats(0, 1e6), min_size=1), ratio=st.floats(0.01, 0.99))
def test_a_quantile_is_the_least_value_that_enough_values_do_not_exceed(values: list[float], ratio: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, ratio)
    assert found in values
    assert found is not None
    assert sum(value <= found for value in values) >= ratio * len(values) - 1e-6
    assert sum(value < found for value in values) < ratio * len(values) + 1e-6


def test_no_value_has_no_quantile() -> None:
    assert quantile([], 0.5) is None


def test_runtimes_and_gpu_time_are_split_by_size() -> None:
    found = rows(
        sizes.runtimes([*[job()] * 6, job(gpus=4, duration_s=6 * HOUR), job(gpus=8, duration_s=8 * 24 * HOUR)])
    )
    total = 6 + 24 + 8 * 8 * 24
    assert list(found) == ["1", "2–4", "5–8"]
    assert found["1"]["jobs"] == 6
    assert found["1"]["jobs_percent"] == 75
    assert found["1"]["gpu_time_percent"] == pytest.approx(600 / total)
    assert found["2–4"]["runtime_median_minutes"] == 360
    assert found["5–8"]["over_a_week_percent"] == 100


def test_the_whole_trace_has_its_span_and_only_what_is_known() -> None:
    found = rows(sizes.whole([job(1_507_000_000), job(1_507_000_000 + 86_400 * 2, duration_s=2 * HOUR)]))
    assert found["jobs"]["value"] == 2
    assert found["time between them"]["value"] == 2
    assert found["first submission"]["value"] == "2017-10-03"
    assert found["GPU time"]["value"] == 3
    assert "queues" not in found


def test_a_trace_whose_clock_begins_with_it_has_no_dates() -> None:
    assert "first submission" not in rows(sizes.whole([job(), job(60)]))


def test_a_trace_without_lengths_has_no_gpu_time_instead_of_none_at_all() -> None:
    found = rows(sizes.runtimes([job(duration_s=None)]))
    assert set(found["1"]) == {"gpus", "jobs", "jobs_percent"}
    assert "GPU time" not in rows(sizes.whole([job(duration_s=None)]))


def test_parts_of_a_gpu_are_counted_among_the_one_gpu_jobs() -> None:
    found = rows(sizes.sharing([job(gpus=0.5), job(), job(), job(), job(gpus=8)]))
    assert found["under 1"]["one_gpu_jobs_percent"] == 25
    assert isinstance(sizes.sharing([job(), job(gpus=2)]), Absent)


def test_the_busiest_hour_is_put_beside_the_mean() -> None:
    jobs = [job(day * 86_400 + 7 * HOUR) for day in range(24)] + [job(23.9 * 86_400)]
    found = rows(load.hours(jobs))
    assert found["hour of the day"]["jobs"] == 24
    assert found["hour of the day"]["at"] == "07–08 h"
    assert found["hour of the day"]["to_mean_ratio"] == pytest.approx(24 / (25 / 24))
    assert found["day"]["jobs"] == 2


def test_queues_are_ordered_by_gpu_time_and_add_up() -> None:
    jobs = [replace(job(gpus=gpus), queue=queue) for gpus, queue in ((1, "small"), (8, "large"), (1, "small"))]
    found = rows(load.queues(jobs))
    assert list(found) == ["large", "small"]
    assert found["large"]["gpu_time_percent"] == 80
    assert found["small"]["gpu_time_so_far_percent"] == pytest.approx(100)
    assert isinstance(load.queues([job()]), Absent)


def test_delays_are_given_by_queue_and_size() -> None:
    jobs = [replace(job(gpus=gpus), start_s=delay, queue="q") for gpus, delay in ((1, 0.0), (1, 100.0), (16, 3000.0))]
    found = queueing.delays([*jobs, job()])
    assert isinstance(found, Table)
    cells = {(row[0], row[1]): row for row in found.rows}
    assert cells["all", "all"][2:4] == (3, 100.0)
    assert cells["q", "> 8"][3] == 3000
    assert cells["q", "1"][-1] == 50


def test_waiting_below_the_peak_is_told_from_waiting_at_it() -> None:
    running = replace(job(gpus=4, duration_s=100), start_s=0.0, queue="q")
    # 60 s while all 4 GPUs are in use, then 50 s while none is
    waiting = replace(job(40, gpus=4, duration_s=100), start_s=150.0, queue="q")
    (wait,) = queueing.waits([running, waiting])
    assert (wait.at_s, wait.below_s) == (60, 50)
    found = queueing.causes([running, waiting])
    assert isinstance(found, Table)
    assert found.estimated
    assert rows(found)["all"]["below_peak_percent"] == pytest.approx(100 * 50 / 110)


def test_a_small_job_fits_below_a_peak_that_a_large_one_does_not() -> None:
    jobs = [
        replace(job(gpus=8, duration_s=10), start_s=0.0, queue="q"),
        replace(job(gpus=5, duration_s=100), start_s=10.0, queue="q"),
        replace(job(20, gpus=3, duration_s=5), start_s=80.0, queue="q"),
        replace(job(20, gpus=8, duration_s=5), start_s=110.0, queue="q"),
    ]
    waits = {wait.job.gpus: wait for wait in queueing.waits(jobs)}
    assert waits[3].below_s == 60
    assert waits[8].below_s == 0


TIMES = st.integers(0, 50).map(float)


@given(jobs=st.lists(st.tuples(TIMES, TIMES, TIMES, st.sampled_from([0.5, 1, 2, 8])), min_size=1, max_size=12))
def test_waiting_is_divided_as_when_each_second_is_looked_at(jobs: list[tuple[float, float, float, float]]) -> None:
    trace = [
        replace(job(submit_s, gpus, duration_s), start_s=submit_s + delay_s, queue="q")
        for submit_s, delay_s, duration_s, gpus in jobs
    ]

    def in_use(time_s: float) -> float:
        return sum(
            one.gpus for one in trace if (one.start_s or 0) <= time_s < (one.start_s or 0) + (one.duration_s or 0)
        )

    peak = max(in_use(second + 0.5) for second in range(200))
    for wait in queueing.waits(trace):
        start_s = wait.job.start_s or 0
        seconds = [second + 0.5 for second in range(int(wait.job.submit_s), int(start_s))]
        below_s = sum(in_use(second) <= max(0, peak - wait.job.gpus) for second in seconds)
        assert wait.below_s == pytest.approx(below_s)
        assert wait.below_s + wait.at_s == pytest.approx(start_s - wait.job.submit_s)


def test_a_job_that_still_runs_holds_its_gpus_to_the_end() -> None:
    steps = load.usage([replace(job(duration_s=None), start_s=5.0), replace(job(duration_s=10), start_s=10.0)])
    assert list(steps.times_s) == [5, 10, 20]
    assert list(steps.gpus) == [1, 2, 0]
    found = rows(
        load.in_use([replace(job(duration_s=10), start_s=0.0), replace(job(gpus=3, duration_s=5), start_s=0.0)])
    )
    assert found["in use"]["peak_gpus"] == 4
    assert found["in use"]["mean_gpus"] == pytest.approx(2.5)


def test_servers_are_put_beside_delay_for_jobs_with_several_gpus() -> None:
    jobs = [replace(job(gpus=16), start_s=60.0 * servers, servers=servers) for servers in (2, 2, 4)]
    found = locality.delays([*jobs, replace(job(), start_s=1.0, servers=1)])
    assert isinstance(found, Table)
    assert found.rows == (("> 8", "2", 2, 120.0, 120.0), ("> 8", "4", 1, 240.0, 240.0))


def test_utilisation_is_weighted_by_gpu_time() -> None:
    jobs = [
        replace(job(gpus=1, duration_s=10), utilisation=1.0),
        replace(job(gpus=8, duration_s=30), utilisation=0.5, servers=1),
        replace(job(gpus=8, duration_s=10), utilisation=0.1, servers=2),
    ]
    found = rows(locality.utilisation(jobs))
    assert found["8"]["utilisation_percent"] == pytest.approx(40)
    assert found["all"]["utilisation_percent"] == pytest.approx(100 * (10 + 120 + 8) / 330)
    spread = locality.spread(jobs)
    assert isinstance(spread, Table)
    assert [row[:3] for row in spread.rows] == [("8", "1", 1), ("8", "2", 1)]


def test_statuses_are_counted_by_jobs_and_gpu_time() -> None:
    jobs = [
        replace(job(), status="passed", attempts=1),
        replace(job(), status="passed", attempts=3),
        replace(job(gpus=2), status="failed", attempts=4),
        job(),
    ]
    found = rows(status.endings(jobs))
    assert list(found) == ["passed", "failed"]
    assert found["passed"]["jobs_percent"] == pytest.approx(200 / 3)
    assert found["failed"]["gpu_time_percent"] == 50
    assert found["passed"]["attempts_mean"] == 2
    assert rows(status.attempts(jobs))["all"]["retried_percent"] == pytest.approx(200 / 3)


def test_what_a_trace_lacks_is_absent_with_the_reason() -> None:
    absent = {part.name: part.lacks for part in analyse(Trace((job(), job(5)))) if isinstance(part, Absent)}
    assert set(absent) == {
        *("sharing", "queues", "in_use", "queueing", "causes"),
        *("locality", "utilisation", "spread", "status", "attempts"),
    }
    assert all(absent.values())


def test_a_trace_without_a_job_says_what_became_of_its_rows() -> None:
    trace = Trace(())
    trace.dropped["asks for no GPU"] += 3
    with pytest.raises(FleetError, match="asks for no GPU: 3"):
        analyse(trace)


@given(
    jobs=st.lists(
        st.builds(
            TraceJob,
            key=st.text(max_size=3),
            submit_s=st.floats(0, 1e9),
            gpus=st.sampled_from([0.25, 1, 4, 100]),
            duration_s=st.none() | st.floats(0, 1e7),
            queue=st.none() | st.text(max_size=2),
            status=st.none() | st.sampled_from(["passed", "lost"]),
            attempts=st.none() | st.integers(1, 9),
            servers=st.none() | st.integers(1, 9),
            utilisation=st.none() | st.floats(0, 1),
        ),
        min_size=1,
        max_size=6,
    ),
    delays=st.lists(st.none() | st.floats(0, 1e6), min_size=6, max_size=6),
)
def test_every_trace_has_tables_whose_cells_are_finite(jobs: list[TraceJob], delays: list[float | None]) -> None:
    started = [
        replace(one, start_s=None if delay is None else one.submit_s + delay)
        for one, delay in zip(jobs, delays, strict=False)
    ]
    for part in analyse(Trace(tuple(sorted(started, key=lambda one: one.submit_s)))):
        assert isinstance(part, Absent) or part.rows
        for row in part.rows if isinstance(part, Table) else ():
            assert all(math.isfinite(cell) for cell in row if isinstance(cell, (int, float)))


def test_a_column_that_is_unknown_in_every_row_is_left_out() -> None:
    columns = (Column("name", "name"), Column("known", "known"), Column("unknown", "unknown"))
    found = table("t", "T", columns, [("a", 1, None), ("b", None, None)])
    assert [column.name for column in found.columns] == ["name", "known"]


@pytest.mark.parametrize(
    ("cell", "shown"), [(None, "–"), (82_247, "82,247"), (187.7, "188"), (18.06, "18.1"), (0.351, "0.35"), (0.0, "0.0")]
)
def test_figures_are_printed_with_the_digits_that_they_carry(cell: Cell, shown: str) -> None:
    assert Column("x", "x").shown(cell) == shown


def test_names_out_of_a_trace_are_printed_without_what_a_terminal_obeys() -> None:
    assert printable("a\x1b[2Jb\x9bc\n") == "a\\x1b[2Jb\\x9bc\\n"
    assert Column("x", "x").shown("\x07") == "\\x07"


def test_every_part_has_a_name_of_its_own() -> None:
    names = [part([job()]).name for part in PARTS]
    assert len(set(names)) == len(names)
