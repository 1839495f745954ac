# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Helios (SC'21): `cluster_log.csv` of one of four clusters, as Slurm wrote it.

Jobs without a GPU, more than half of the rows, are dropped and counted. `duration` and `queue` are not read: they are
differences of the three times. The authors count a timeout and a node's failure as failed, and so it is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from sys import intern
from typing import Final, TextIO

from fleet.model import TraceJob
from fleet.traces.rows import Row, csv_rows, date_s, elapsed_s, good_jobs, gpu_count, name, needed, server_count

_COLUMNS: Final = ("job_id", "vc", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time")
_STATUS: Final = {
    "COMPLETED": "passed",
    "CANCELLED": "killed",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
}


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The jobs in the file's order."""
    return good_jobs(csv_rows(text, _COLUMNS, dropped), _job, dropped)


def _job(row: Row) -> TraceJob:
    gpus = gpu_count(row["gpu_num"])
    submit_s = needed(date_s(row["submit_time"], "time of submission"), "time of submission")
    start_s = date_s(row["start_time"], "start")
    elapsed_s(submit_s, start_s, "delay")
    queue = name(row["vc"])
    return TraceJob(
        key=row["job_id"],
        submit_s=submit_s,
        gpus=gpus,
        duration_s=elapsed_s(start_s, date_s(row["end_time"], "end"), "duration"),
        start_s=start_s,
        queue=None if queue is None else intern(queue),
        status=_STATUS.get(row["state"].strip().upper()),
        servers=server_count(row["node_num"]),
    )
