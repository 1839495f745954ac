# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows of a trace, whatever its format: the columns that must be there, and fields that are numbers and times.

A field that is missing is None; one that is wrong raises BadRowError, whose reason is counted. So a reader says only
what its columns mean.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Final, TextIO, TypeVar

from fleet.model import FleetError, TraceJob

Row = dict[str, str]
"""Column → field"""
Raw = TypeVar("Raw")

UNKNOWN: Final = frozenset({"", "none", "null", "nan", "n/a", "\\n"})
"""Fields, in lower case, that say that nothing is known; \\n: as databases export NULL"""
_MOST: Final = 1e15
"""Of any number in a trace: thirty million years; products of such numbers are finite"""
_ZONES: Final = {"PST": -8, "PDT": -7, "UTC": 0, "GMT": 0}  # abbreviation → hours east of Greenwich


class BadRowError(Exception):
    """A row holds no job; the text is the reason, in words that do not depend on the row."""


def good_jobs(rows: Iterator[Raw], parse: Callable[[Raw], TraceJob], dropped: Counter[str]) -> Iterator[TraceJob]:
    """What `parse` makes of the rows, without those for which it raises BadRowError."""
    for row in rows:
        try:
            yield parse(row)
        except BadRowError as bad:
            dropped[str(bad)] += 1


def csv_rows(text: TextIO, columns: Sequence[str], dropped: Counter[str]) -> Iterator[Row]:
    """The rows below the header. FleetError: the file is empty, or the header lacks some of `columns`."""
    reader = csv.reader(text)
    header = [name.strip() for name in next(_records(reader, dropped), [])]
    if not header:
        raise FleetError("it is empty")
    if missing := [name for name in columns if name not in header]:
        raise FleetError(f"the columns {', '.join(missing)} are missing; it has {_shown(header)}")
    for record in _records(reader, dropped):
        if len(record) == len(header):
            yield dict(zip(header, record, strict=True))
        elif record:  # an empty line is no row
            dropped["wrong number of fields"] += 1


def _records(reader: Iterator[list[str]], dropped: Counter[str]) -> Iterator[list[str]]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error:
            dropped["not CSV"] += 1


def _shown(header: list[str]) -> str:
    """A few columns of a header, short enough for a message whatever the file is."""
    line = ", ".join(name[:20] for name in header[:8])
    return ascii(line)[1:-1] + (", …" if len(header) > 8 else "")


def number(field: str | float | None, what: str) -> float | None:
    """None: unknown. BadRowError: no finite number, negative, or too large."""
    if field is None or (isinstance(field, str) and field.strip().lower() in UNKNOWN):
        return None
    try:
        value = float(field)
    except (ValueError, TypeError):
        raise BadRowError(f"{what} is no number") from None
    if not math.isfinite(value):
        raise BadRowError(f"{what} is no number")
    if value < 0:
        raise BadRowError(f"{what} is negative")
    if value > _MOST:
        raise BadRowError(f"{what} is too large")
    return value


def needed(value: float | None, what: str) -> float:
    """BadRowError: unknown."""
    if value is None:
        raise BadRowError(f"no {what}")
    return value


def gpu_count(field: str | float | None) -> float:
    """GPUs that the job asks for. BadRowError: none."""
    gpus = needed(number(field, "number of GPUs"), "number of GPUs")
    if gpus == 0:
        raise BadRowError("asks for no GPU")
    return gpus


def server_count(field: str | None) -> int | None:
    """Servers that the job ran on; None: unknown."""
    servers = number(field, "number of servers")
    return int(servers) if servers else None


def date_s(field: str | None, what: str) -> float | None:
    """Seconds since 1970 of `YYYY-mm-dd HH:MM:SS`, read as UTC unless it names an offset or zone. None: unknown."""
    if field is None or field.strip().lower() in UNKNOWN:
        return None
    stamp, zone = field.strip(), UTC
    if stamp[-3:] in _ZONES:
        stamp, zone = stamp[:-3].rstrip(), timezone(timedelta(hours=_ZONES[stamp[-3:]]))
    try:
        date = datetime.fromisoformat(stamp)
    except ValueError:
        raise BadRowError(f"{what} is no date") from None
    return (date if date.tzinfo else date.replace(tzinfo=zone)).timestamp()


def elapsed_s(begin_s: float | None, end_s: float | None, what: str) -> float | None:
    """From one time to the other; None if one is unknown. BadRowError: the end is before the beginning."""
    if begin_s is None or end_s is None:
        return None
    if end_s < begin_s:
        raise BadRowError(f"{what} is negative")
    return end_s - begin_s


def name(field: str | None) -> str | None:
    """A queue, user or program; None: unknown."""
    return None if field is None or field.strip().lower() in UNKNOWN else field.strip()
