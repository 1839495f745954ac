# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Philly's jobs as one table, as the simulators of Pollux (OSDI'21) and Sia bring them: no placement, status or delay.

`timestamp` is taken as the submission, as those simulators do; a start that is not recorded stays unknown. `gpu_time`
is not read: it is `duration` × `num_gpus`. Rows have no name, so a job's key is its row, from 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from sys import intern
from typing import Final, TextIO

from fleet.model import TraceJob
from fleet.traces.rows import Row, csv_rows, date_s, good_jobs, gpu_count, name, needed, number

_COLUMNS: Final = ("timestamp", "duration", "num_gpus", "cluster")


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The jobs in the file's order."""
    return good_jobs(enumerate(csv_rows(text, _COLUMNS, dropped), start=1), _job, dropped)


def _job(numbered: tuple[int, Row]) -> TraceJob:
    index, row = numbered
    queue = name(row["cluster"])
    return TraceJob(
        key=str(index),
        submit_s=needed(date_s(row["timestamp"], "time of submission"), "time of submission"),
        gpus=gpu_count(row["num_gpus"]),
        duration_s=number(row["duration"], "duration"),
        queue=None if queue is None else intern(queue),
    )
