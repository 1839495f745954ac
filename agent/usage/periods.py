# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Periods as people write them: 24h, 7d, 2026-11-20T10:00, start, now. Pure: the present is an argument.

A time without an offset is local time. The ledger counts by hours of UTC, so a period is widened to whole ones.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from agent.errors import UsageError
from agent.usage.amounts import SECONDS_PER_HOUR

_AGO = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_HOW = "write 24h, 7d, 2026-11-20, 2026-11-20T10:00 or start"


def period(since: str, until: str | None, now: datetime) -> tuple[int, int]:
    """[since, until) in seconds since 1970, both on the hour. UsageError says how to write it."""
    first = _hour(_instant("--since", since, now))
    last = _hour(_instant("--until", until or "now", now) + SECONDS_PER_HOUR - (1 if until else 0))
    if last <= first:
        raise UsageError(f"--until {until or 'now'} is not after --since {since}")
    return first, last


def local(hour: int) -> str:
    """An hour's beginning for people: local time with its offset."""
    return datetime.fromtimestamp(hour, UTC).astimezone().strftime("%Y-%m-%d %H:%M %z")


def utc(hour: int) -> str:
    """An hour's beginning for programs: ISO 8601 in UTC."""
    return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _instant(option: str, text: str, now: datetime) -> int:
    if text == "start":
        return 0
    if text == "now":
        return int(now.timestamp())
    try:
        if ago := _AGO.fullmatch(text):
            return int((now - int(ago[1]) * _UNITS[ago[2]]).timestamp())
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{option} {text}: {_HOW}") from error


def _hour(seconds: int) -> int:
    return max(0, seconds - seconds % SECONDS_PER_HOUR)
