# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.command import main

HEADER = "timestamp,duration,num_gpus,gpu_time,cluster\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Five good rows of two clusters, and a bad one."""
    path = tmp_path / "trace.csv"
    rows = [f"2017-10-09 07:0{minute}:00,{600 - 100 * minute},1,0,{'ab'[minute % 2]}" for minute in range(5)]
    path.write_text(HEADER + "\n".join([*rows, "never,1,1,1,a", ""]))
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], trace: str, *options: str) -> list[dict[str, Any]]:
    code = main(["simulate", trace, "--format", "philly_csv", "--gpus", "1", "--json", *options])
    assert code == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_there_is_a_row_a_policy_in_the_order_given(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = simulated(capsys, trace, "--policies", "fifo,srtf,bsbf", "--slowdown", "1.2", "--restart", "0")
    assert [row["policy"] for row in rows] == ["fifo", "srtf", "bsbf"]
    assert [row["jobs"] for row in rows] == [5, 5, 5]
    assert rows[1]["average_jct_s"] < rows[0]["average_jct_s"]
    assert {"trace", "makespan_s", "p99_jct_s", "p99_queueing_s", "utilisation_ratio"} <= set(rows[0])


def test_the_table_shows_ratios_to_the_first_policy_and_what_was_left_out(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", trace, "--format", "philly_csv", "--gpus", "1", "--policies", "fifo,sjf"]) == 0
    shown = capsys.readouterr().out
    assert "(1.00)" in shown
    assert "ratio to fifo" in shown
    assert "rows of the trace without a job: 1 (" in shown


def test_a_queue_and_its_first_jobs_can_be_chosen(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = simulated(capsys, trace, "--policies", "fifo", "--queue", "a", "--first", "2")
    assert row["jobs"] == 2
    assert row["makespan_s"] == 600 + 400


def test_a_sample_depends_on_the_seed_alone(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policies", "fifo", "--sample", "0.7", "--seed")
    counts = [simulated(capsys, trace, *options, str(seed))[0]["makespan_s"] for seed in range(5)]
    again = [simulated(capsys, trace, *options, str(seed))[0]["makespan_s"] for seed in range(5)]
    assert counts == again
    assert len(set(counts)) > 1


def test_beside_services_jobs_run_at_the_speed_that_the_predictor_expects(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = tmp_path / "services.json"
    service = {"kind": "s", "load": 0.5, "gap_s": 1e9, "slack_s": 1, "free_bytes": 10}
    offline = {"default": {"memory_bytes": 5, "kernel_s": 0.001}}
    services.write_text(json.dumps({"services": [service], "offline": offline}))
    (row,) = simulated(capsys, trace, "--policies", "pairing", "--first", "1", "--services", str(services))
    assert row["average_jct_s"] == pytest.approx(600 / 0.5, rel=1e-6)
    large = {"default": {"memory_bytes": 11, "kernel_s": 0.001}}
    services.write_text(json.dumps({"services": [service], "offline": large}))
    (row,) = simulated(capsys, trace, "--policies", "pairing", "--first", "1", "--services", str(services))
    assert row["dropped"] == {"found no GPU that it may use": 1}
    assert row["average_jct_s"] is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--policies", "best"], "no policy is called 'best'; there are: fifo"),
        (["--slowdown", "0.5"], "at least 1"),
        (["--slowdown", "absent.json"], "cannot read the table of slowdowns absent.json"),
        (["--queue", "z"], "no job of the queue 'z'"),
        (["--sample", "0"], "over 0 and at most 1"),
        (["--gpus-per-node", "2"], "whole nodes"),
        (["--thresholds", "5,3"], "ascend"),
    ],
)
def test_what_is_wrong_with_the_options_is_said(
    trace: str, capsys: pytest.CaptureFixture[str], options: list[str], reason: str
) -> None:
    assert main(["simulate", trace, "--format", "philly_csv", "--gpus", "1", *options]) == 2
    assert reason in capsys.readouterr().err
