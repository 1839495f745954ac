# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Muri's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.traces import read_trace

HEADER = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,"
    "iteration_time,resource_time_0,resource_time_1,resource_time_2,priority\n"
)


def written(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


def test_times_are_milliseconds_and_a_job_takes_its_iterations(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "7,8,1500,100,toy,4,90000,0,500,0.5,400,50,1"), "muri")
    (job,) = trace.jobs
    assert (job.key, job.gpus, job.kind) == ("7", 8, "toy")
    assert job.submit_s == pytest.approx(1.5)
    assert job.duration_s == pytest.approx(50)
    assert job.resource_s == pytest.approx((0.0005, 0.4, 0.05))
    assert job.start_s is None
    assert job.status is None


def test_a_job_lacks_its_resources_where_one_of_them_is_unknown(tmp_path: Path) -> None:
    (job,) = read_trace(written(tmp_path, "7,8,1500,100,toy,4,90000,0,500,0.5,,50,1"), "muri").jobs
    assert job.resource_s is None


def test_bad_rows_are_counted_by_reason(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            "0,0,0,100,toy,4,1,0,500,1,1,1,0",
            "1,1,soon,100,toy,4,1,0,500,1,1,1,0",
            "2,1,,100,toy,4,1,0,500,1,1,1,0",
            "3,1,0,-5,toy,4,1,0,500,1,1,1,0",
            "4,1,0",
            "5,1,0,100,toy,4,1,0,500,1,1,1,0",
        ),
        "muri",
    )
    assert [job.key for job in trace.jobs] == ["5"]
    assert trace.dropped == {
        "asks for no GPU": 1,
        "time of submission is no number": 1,
        "no time of submission": 1,
        "number of iterations is negative": 1,
        "wrong number of fields": 1,
    }
