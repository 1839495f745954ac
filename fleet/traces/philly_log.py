# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`cluster_job_log` of Microsoft's Philly (ATC'19): a JSON list of jobs with every attempt and the GPUs that it had.

The list is read job by job and never held as a whole. What a job asked for is not in the log: its GPUs and servers are
those of the first attempt that names any, which is also the placement that the queueing delay was spent for. A job
without such an attempt is dropped. Times have no zone; they are compared with each other alone, so an hour may be off
across the change of daylight saving time on 5 November 2017. The log has no utilisation (that is `cluster_gpu_util`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from sys import intern
from typing import Any, Final, TextIO

from fleet.model import FleetError, TraceJob
from fleet.traces.rows import BadRowError, date_s, elapsed_s, good_jobs, name, needed

_STATUS: Final = {"Pass": "passed", "Killed": "killed", "Failed": "failed"}
_KEYS: Final = ("jobid", "attempts", "submitted_time")
_CHUNK: Final = 1 << 16
_LONGEST_JOB: Final = 1 << 20  # characters; a bound on what a broken file makes us hold


def jobs(text: TextIO, dropped: Counter[str]) -> Iterator[TraceJob]:
    """The jobs in the file's order. FleetError: no JSON list of jobs."""
    return good_jobs(_entries(text, dropped), _job, dropped)


def _entries(text: TextIO, dropped: Counter[str]) -> Iterator[object]:
    """The elements of the file's list. What follows a mistake in the JSON cannot be separated and is lost."""
    buffer = text.read(_CHUNK).lstrip()
    if not buffer.startswith("["):
        raise FleetError("it is no JSON list" if buffer else "it is empty")
    buffer, count = buffer[1:], 0
    while True:
        buffer = buffer.lstrip(" \t\r\n,")
        entry, end = _first(buffer)
        if end:
            if not count:
                _check(entry)
            yield entry
            buffer, count = buffer[end:], count + 1
        elif buffer.startswith("]"):
            return
        elif len(buffer) > _LONGEST_JOB or not (more := text.read(_CHUNK)):
            if not count:
                raise FleetError("its list holds no job")
            dropped["the JSON is broken from here on"] += 1
            return
        else:
            buffer += more


def _first(buffer: str) -> tuple[object, int]:
    """The value that the buffer begins with and where it ends; 0: it is not complete."""
    if not buffer.startswith("{"):  # a bare number or word may go on behind the buffer's end
        return None, 0
    try:
        return json.JSONDecoder().raw_decode(buffer)
    except (ValueError, RecursionError):
        return None, 0


def _check(entry: object) -> None:
    keys = list(entry) if isinstance(entry, dict) else []
    if missing := [key for key in _KEYS if key not in keys]:
        raise FleetError(f"the keys {', '.join(missing)} are missing in its first entry")


@dataclass(frozen=True, slots=True)
class _Attempt:
    begin_s: float | None
    end_s: float | None
    gpus: int
    servers: int


def _job(entry: Any) -> TraceJob:
    attempts = [_attempt(attempt) for attempt in _list(entry.get("attempts"))]
    placed = next((attempt for attempt in attempts if attempt.gpus), None)
    if placed is None:
        raise BadRowError("no attempt with a GPU")
    submit_s = needed(_date(entry.get("submitted_time"), "time of submission"), "time of submission")
    start_s = attempts[0].begin_s
    elapsed_s(submit_s, start_s, "delay")
    queue = _text(entry.get("vc"))
    return TraceJob(
        key=_text(entry.get("jobid")) or "",
        submit_s=submit_s,
        gpus=placed.gpus,
        duration_s=elapsed_s(start_s, attempts[-1].end_s, "duration"),
        start_s=start_s,
        queue=None if queue is None else intern(queue),
        status=_STATUS.get(_text(entry.get("status")) or ""),
        attempts=len(attempts),
        servers=placed.servers,
    )


def _attempt(attempt: object) -> _Attempt:
    if not isinstance(attempt, dict):
        raise BadRowError("an attempt is no object")
    detail = [part for part in _list(attempt.get("detail")) if isinstance(part, dict)]
    gpus = [len(_list(part.get("gpus"))) for part in detail]
    return _Attempt(
        begin_s=_date(attempt.get("start_time"), "start"),
        end_s=_date(attempt.get("end_time"), "end"),
        gpus=sum(gpus),
        servers=sum(1 for count in gpus if count),
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return name(value) if isinstance(value, str) else None


def _date(value: object, what: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRowError(f"{what} is no date")
    return date_s(value, what)
