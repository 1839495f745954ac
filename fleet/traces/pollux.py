# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Workloads of Pollux (OSDI'21): when which application was submitted, with how many replicas and which batch size.

A replica has one GPU. How long a job takes is not in the file: in Pollux it follows from what the scheduler gives it,
by profiles of the application, which no part of this project reads. So `duration_s` is unknown, and simulating such a
workload needs lengths from elsewhere. `kind` holds the batch size too, as jobs of one kind have to behave alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, TextIO

from fleet.model import TraceJob
from fleet.traces.rows import Row, csv_rows, good_jobs, gpu_count, name, needed, number

_COLUMNS: Final = ("name", "time", "application", "num_replicas", "batch_size")


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The jobs in the file's order; `submit_s` counts from the workload's beginning."""
    return good_jobs(csv_rows(text, _COLUMNS, dropped), _job, dropped)


def _job(row: Row) -> TraceJob:
    application, batch = name(row["application"]), name(row["batch_size"])
    return TraceJob(
        key=row["name"],
        submit_s=needed(number(row["time"], "time of submission"), "time of submission"),
        gpus=gpu_count(row["num_replicas"]),
        duration_s=None,
        kind=application if application is None or batch is None else f"{application}-{batch}",
    )
