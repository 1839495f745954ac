# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The formats of traces as a whole: opening files, and what every reader does with bad ones."""

from __future__ import annotations

import gzip
import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError
from fleet.traces import FORMATS, read_trace

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_jobs_come_by_time_of_submission(tmp_path: Path) -> None:
    path = written(tmp_path, PHILLY + "2017-10-09 07:01:55,66,1,66,b\n2017-10-09 06:13:03,2951.0,2,5902,a\n")
    first, second = read_trace(path, "philly_csv").jobs
    assert (first.key, second.key) == ("2", "1")
    assert second.submit_s - first.submit_s == 48 * 60 + 52
    assert (first.gpus, first.duration_s, first.gpu_seconds, first.queue) == (2, 2951, 5902, "a")
    assert first.start_s is None


def test_a_file_of_another_format_is_refused_with_the_columns_that_are_missing(tmp_path: Path) -> None:
    path = written(tmp_path, "when,num_gpus,\x1b[31mcolour\n1,2,3\n")
    with pytest.raises(FleetError, match="timestamp, duration, cluster are missing") as caught:
        read_trace(path, "philly_csv")
    assert "\x1b" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", list(FORMATS))
def test_an_empty_file_is_no_trace(tmp_path: Path, name: str) -> None:
    with pytest.raises(FleetError, match="empty"):
        read_trace(written(tmp_path, ""), name)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_missing_file_and_a_folder_are_errors_and_no_tracebacks(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(FleetError, match="cannot read"):
            read_trace(path, name)


def test_an_unknown_format_is_answered_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="philly_csv"):
        read_trace(tmp_path / "trace", "borg")


def test_a_packed_trace_is_unpacked_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(PHILLY + "2017-10-09 07:01:55,66,1,66,a\n")
    assert len(read_trace(path, "philly_csv").jobs) == 1


def test_a_packed_trace_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((PHILLY + "2017-10-09 07:01:55,66,1,66,a\n").encode())[:-12])
    with pytest.raises(FleetError, match="cannot read"):
        read_trace(path, "philly_csv")


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    row = f"2017-10-09 07:01:55,66,1,66,{'a' * 1000}\n"
    path = written(tmp_path, PHILLY + row * 3000)
    seen: list[tuple[int, int]] = []
    trace = read_trace(path, "philly_csv", lambda done, whole: seen.append((done, whole)))
    size = path.stat().st_size
    assert len(trace.jobs) == 3000
    assert len(seen) > 1  # read in pieces
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_bytes_that_are_no_text_spoil_a_name_and_not_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + PHILLY.encode() + b"2017-10-09 07:01:55,66,1,66,\xff\xfe\n")
    (job,) = read_trace(path, "philly_csv").jobs
    assert job.queue == "\ufffd\ufffd"


def test_a_trace_that_leaves_out_a_field_leaves_it_unknown(tmp_path: Path) -> None:
    (job,) = read_trace(written(tmp_path, PHILLY + "2017-10-09 07:01:55,None,1,66,\n"), "philly_csv").jobs
    assert job.duration_s is None
    assert job.queue is None
    assert job.gpu_seconds is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("yesterday,66,1,66,a", "time of submission is no date"),
        (",66,1,66,a", "no time of submission"),
        ("2017-10-09 07:01:55,-1,1,66,a", "duration is negative"),
        ("2017-10-09 07:01:55,inf,1,66,a", "duration is no number"),
        ("2017-10-09 07:01:55,66,0,66,a", "asks for no GPU"),
        ("2017-10-09 07:01:55,66,,66,a", "no number of GPUs"),
        ("2017-10-09 07:01:55,66,1,66", "wrong number of fields"),
        ("2017-10-09 07:01:55,66,1,66," + "x" * 200_000, "not CSV"),
    ],
)
def test_a_bad_row_is_counted_and_the_others_are_read(tmp_path: Path, row: str, reason: str) -> None:
    trace = read_trace(written(tmp_path, f"{PHILLY}{row}\n2017-10-09 07:01:55,66,1,66,a\n"), "philly_csv")
    assert len(trace.jobs) == 1
    assert trace.dropped == {reason: 1}


def test_every_format_says_where_its_data_are_and_under_which_licence() -> None:
    for known in FORMATS.values():
        assert known.source.startswith("https://")
        assert known.licence
        assert known.fetch


@given(body=st.text(max_size=400), name=st.sampled_from(sorted(FORMATS)), entry=st.booleans())
def test_no_text_makes_a_reader_fail_but_by_saying_so(body: str, name: str, entry: bool) -> None:
    header = "" if entry else HEADERS[name]
    dropped: Counter[str] = Counter()
    try:
        jobs = list(FORMATS[name].read(io.StringIO(header + body), dropped))
    except FleetError:
        return
    assert all(job.gpus > 0 for job in jobs)


HEADERS = {
    "philly_csv": PHILLY,
    "philly_log": '[{"jobid": "a", "attempts": [], "submitted_time": "2017-10-09 07:01:55"},',
    "helios": "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n",
    "openb": "name,num_gpu,gpu_milli,qos,pod_phase,creation_time,deletion_time,scheduled_time\n",
    "muri": "job_id,num_gpu,submit_time,iterations,model_name,iteration_time\n",
    "pollux": "name,time,application,num_replicas,batch_size\n",
}
