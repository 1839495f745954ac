# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Traces of Muri (SIGCOMM'22): jobs with a model, and what an iteration of it takes of each resource.

All times are milliseconds, though the file does not say so: the authors' simulator divides them by 1,000, and so the
last submission is 27 days after the first, which agrees with the makespans that they publish in seconds.

A job's length alone is `iterations` × `iteration_time`, not `duration`: in the authors' own results for this trace
under SRTF 98 % of the jobs ran at least .998 of the product (a quarter at most 1.02 of it, the rest longer), while a
tenth ran under .95 of `duration`, and the product is 5.4 times the `duration` of five jobs with 32 GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, TextIO

from fleet.model import TraceJob
from fleet.traces.rows import Row, csv_rows, good_jobs, gpu_count, name, needed, number

_COLUMNS: Final = ("job_id", "num_gpu", "submit_time", "iterations", "iteration_time", "model_name")
_RESOURCE: Final = "resource_time_"
_MS: Final = 1e-3


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The jobs in the file's order; `submit_s` counts from the trace's beginning."""
    return good_jobs(csv_rows(text, _COLUMNS, dropped), _job, dropped)


def _job(row: Row) -> TraceJob:
    iterations = number(row["iterations"], "number of iterations")
    iteration_s = _seconds(row["iteration_time"], "time of an iteration")
    return TraceJob(
        key=row["job_id"],
        submit_s=needed(_seconds(row["submit_time"], "time of submission"), "time of submission"),
        gpus=gpu_count(row["num_gpu"]),
        duration_s=None if iterations is None or iteration_s is None else iterations * iteration_s,
        kind=name(row["model_name"]),
        resource_s=_resources(row),
    )


def _resources(row: Row) -> tuple[float, ...] | None:
    """Seconds of an iteration by resource; None where one of them is unknown."""
    columns = sorted(column for column in row if column.startswith(_RESOURCE))
    times = [_seconds(row[column], "time of a resource") for column in columns]
    known = tuple(time for time in times if time is not None)
    return known if known and len(known) == len(times) else None


def _seconds(field: str, what: str) -> float | None:
    milliseconds = number(field, what)
    return None if milliseconds is None else milliseconds * _MS
