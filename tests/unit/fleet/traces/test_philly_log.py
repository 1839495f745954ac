# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Philly's own job log."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError, Trace
from fleet.traces import philly_log, read_trace


def attempt(start: Any, end: Any, *gpus_by_server: int) -> dict[str, Any]:
    detail = [
        {"ip": f"m{server}", "gpus": [f"gpu{gpu}" for gpu in range(gpus)]} for server, gpus in enumerate(gpus_by_server)
    ]
    return {"start_time": start, "end_time": end, "detail": detail}


def entry(*attempts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    whole = {
        "status": "Pass",
        "vc": "a1",
        "jobid": "application_1",
        "attempts": list(attempts),
        "submitted_time": "2017-10-07 01:00:00",
        "user": "u",
    }
    return whole | changes


def read(tmp_path: Path, *entries: Any) -> Trace:
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps(entries, indent=2))
    return read_trace(path, "philly_log")


def test_a_job_spans_its_attempts_and_its_delay_ends_at_the_first(tmp_path: Path) -> None:
    first = attempt("2017-10-07 01:01:00", "2017-10-07 01:02:00", 8, 8)
    second = attempt("2017-10-07 01:03:00", "2017-10-07 02:01:00", 16)
    (job,) = read(tmp_path, entry(first, second)).jobs
    assert job.start_s is not None
    assert (job.start_s - job.submit_s, job.duration_s) == (60, 3600)
    assert (job.gpus, job.servers, job.attempts, job.status, job.queue) == (16, 2, 2, "passed", "a1")
    assert job.utilisation is None


@pytest.mark.parametrize("unknown", ["None", None])
def test_a_time_that_was_not_logged_is_unknown(tmp_path: Path, unknown: str | None) -> None:
    running = entry(attempt("2017-10-07 01:01:00", unknown, 1), status="Killed")
    lost = entry(attempt(unknown, "2017-10-07 01:02:00", 1), vc=unknown)
    going, without = read(tmp_path, running, lost).jobs
    assert going.duration_s is None
    assert going.status == "killed"
    assert without.start_s is None
    assert without.queue is None


def test_a_job_without_an_attempt_that_had_a_gpu_is_counted(tmp_path: Path) -> None:
    trace = read(tmp_path, entry(), entry(attempt("None", "None")), entry(attempt("None", "None", 1)))
    assert len(trace.jobs) == 1
    assert trace.dropped == {"no attempt with a GPU": 2}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry(attempt("2017-10-07 00:59:00", "None", 1)), "delay is negative"),
        (entry(attempt("2017-10-07 01:01:00", "2017-10-07 01:00:30", 1)), "duration is negative"),
        (entry(attempt(7, "None", 1)), "start is no date"),
        (entry(attempt("None", "None", 1), submitted_time="None"), "no time of submission"),
        (entry("late"), "an attempt is no object"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_job_is_counted_by_reason(tmp_path: Path, bad: dict[str, Any], reason: str) -> None:
    trace = read(tmp_path, entry(attempt("None", "None", 1)), bad)
    assert len(trace.jobs) == 1
    assert trace.dropped == {reason: 1}


def test_a_log_that_breaks_off_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps([entry(attempt("None", "None", 1))] * 3)[:-40])
    trace = read_trace(path, "philly_log")
    assert len(trace.jobs) == 2
    assert trace.dropped == {"the JSON is broken from here on": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job,status\n1,Pass\n", "no JSON list"),
        ('{"jobs": []}', "no JSON list"),
        ('[{"name": "x"}]', "jobid, attempts, submitted_time are missing"),
        ("[" * 100_000, "holds no job"),
        ("[1, 2", "holds no job"),
        ('[{"jobid": ' + "[" * 100_000, "holds no job"),
    ],
)
def test_what_is_no_job_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster_job_log"
    path.write_text(text)
    with pytest.raises(FleetError, match=message):
        read_trace(path, "philly_log")


@given(names=st.lists(st.text(max_size=30), min_size=1, max_size=8), indent=st.sampled_from([None, 0, 3]))
def test_jobs_are_the_same_wherever_the_file_is_cut_into_pieces(names: list[str], indent: int | None) -> None:
    entries = [entry(attempt("None", "None", 1), jobid=name, padding="}" * 9) for name in names]
    text = json.dumps(entries, indent=indent, ensure_ascii=False)
    dropped: Counter[str] = Counter()
    found = list(philly_log.jobs(_Slow(text), dropped))
    assert len(found) == len(names)
    assert not dropped


class _Slow(io.StringIO):
    """Gives seven characters at a time, whatever is asked for."""

    def read(self, size: int | None = -1, /) -> str:
        return super().read(7)
