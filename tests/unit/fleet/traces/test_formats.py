# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The formats of Helios, openb and Pollux, and the list of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet.command import main
from fleet.model import Trace
from fleet.traces import FORMATS, read_trace

HELIOS = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
POLLUX = "name,time,application,num_replicas,batch_size\n"


def read(tmp_path: Path, name: str, text: str) -> Trace:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, name)


def test_helios_gives_delay_servers_and_status(tmp_path: Path) -> None:
    row = "14,u1,vcA,16,64,2,{},2020-06-09 18:41:00,2020-06-09 18:41:30,2020-06-09 18:51:30,600,30\n"
    trace = read(tmp_path, "helios", HELIOS + row.format("COMPLETED") + row.format("TIMEOUT") + row.format("SUSPENDED"))
    job = trace.jobs[0]
    assert job.start_s is not None
    assert (job.start_s - job.submit_s, job.duration_s, job.gpus, job.servers, job.queue) == (30, 600, 16, 2, "vcA")
    assert [job.status for job in trace.jobs] == ["passed", "failed", None]


def test_helios_drops_jobs_without_a_gpu_and_those_that_start_before_they_are_submitted(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "helios",
        HELIOS
        + "1,u,vc,0,1,1,COMPLETED,2020-06-09 18:41:00,2020-06-09 18:41:30,2020-06-09 18:51:30,600,30\n"
        + "2,u,vc,1,1,1,COMPLETED,2020-06-09 18:41:00,2020-06-09 18:40:30,2020-06-09 18:51:30,600,30\n",
    )
    assert not trace.jobs
    assert trace.dropped == {"asks for no GPU": 1, "delay is negative": 1}


def test_openb_gives_parts_of_a_gpu_to_pods_with_one(tmp_path: Path) -> None:
    rows = (
        "a,1,1,1,460,,LS,Running,100,400,103\n"
        "b,1,1,8,1000,,BE,Succeeded,100,400,100\n"
        "c,1,1,1,1000,,Burstable,Failed,100,400,100\n"
    )
    shared, whole, other = read(tmp_path, "openb", OPENB + rows).jobs
    assert (shared.gpus, whole.gpus, other.gpus) == (0.46, 8, 1)
    assert (shared.online, whole.online, other.online) == (True, False, None)
    assert (shared.status, whole.status, other.status) == (None, "passed", "failed")
    assert (shared.start_s, shared.duration_s) == (103, 297)


def test_an_openb_pod_without_a_node_has_no_start_and_no_duration(tmp_path: Path) -> None:
    (job,) = read(tmp_path, "openb", OPENB + "a,1,1,1,460,,LS,Pending,100,400,\n").jobs
    assert job.start_s is None
    assert job.duration_s is None


def test_openb_counts_pods_without_a_gpu_and_parts_that_cannot_be(tmp_path: Path) -> None:
    rows = "a,1,1,0,0,,LS,Running,100,400,103\nb,1,1,1,1500,,LS,Running,100,400,103\n"
    assert read(tmp_path, "openb", OPENB + rows).dropped == {
        "asks for no GPU": 1,
        "part of a GPU is not 1 to 1,000": 1,
    }


def test_pollux_gives_replicas_and_kinds_and_no_length(tmp_path: Path) -> None:
    (job,) = read(tmp_path, "pollux", POLLUX + "toy-0,53,toy,6,2048\n").jobs
    assert (job.key, job.submit_s, job.gpus, job.kind, job.duration_s) == ("toy-0", 53, 6, "toy-2048", None)


def test_the_command_formats_lists_every_format_with_its_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    text = capsys.readouterr().out
    assert main(["formats", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert set(known) == set(FORMATS)
    for name, entry in known.items():
        assert f"{name}: " in text
        assert entry["licence"] in text
        assert entry["fetch"] in text
