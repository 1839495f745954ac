# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Pods of Alibaba's openb trace (cluster-trace-gpu-v2023, ATC'23), where a pod may ask for a part of one GPU.

`gpu_milli` counts for pods with one GPU alone, as the trace's description says. Its classes LS (latency-sensitive) and
BE (best-effort) tell online from offline; Burstable and Guaranteed tell neither. A pod that never got a node has no
start and no duration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, TextIO

from fleet.model import TraceJob
from fleet.traces.rows import BadRowError, Row, csv_rows, elapsed_s, good_jobs, gpu_count, needed, number

_COLUMNS: Final = (
    "name",
    "num_gpu",
    "gpu_milli",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
)
_STATUS: Final = {"Succeeded": "passed", "Failed": "failed"}
_ONLINE: Final = {"LS": True, "BE": False}


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The pods that ask for a GPU, in the file's order; times count from a beginning that the trace does not give."""
    return good_jobs(csv_rows(text, _COLUMNS, dropped), _job, dropped)


def _job(row: Row) -> TraceJob:
    gpus = _gpus(row)
    submit_s = needed(number(row["creation_time"], "time of creation"), "time of creation")
    start_s = number(row["scheduled_time"], "start")
    elapsed_s(submit_s, start_s, "delay")
    return TraceJob(
        key=row["name"],
        submit_s=submit_s,
        gpus=gpus,
        duration_s=elapsed_s(start_s, number(row["deletion_time"], "end"), "duration"),
        start_s=start_s,
        status=_STATUS.get(row["pod_phase"]),
        online=_ONLINE.get(row["qos"]),
    )


def _gpus(row: Row) -> float:
    gpus = gpu_count(row["num_gpu"])
    if gpus != 1:
        return gpus
    part = needed(number(row["gpu_milli"], "part of a GPU"), "part of a GPU")
    if not 0 < part <= 1000:
        raise BadRowError("part of a GPU is not 1 to 1,000")
    return part / 1000
