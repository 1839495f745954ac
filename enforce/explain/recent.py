# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The latest decisions in a line each, for the status page."""

from __future__ import annotations

from agent.page.content import Told
from enforce.explain.history import History
from enforce.explain.model import Interval, Who
from enforce.explain.text import duration, milliseconds, percent
from enforce.memory.told import MemoryDecision

MOST = 20
MOST_EACH = 6  # of one container: what is decided ten times a second is more than anybody reads


def recent(history: History) -> list[Told]:
    """The newest first, those for latency's and those for memory's sake."""
    names = history.names()
    for_latency = [_latency(who, one) for who, one in history.outlines(MOST_EACH)]
    for_memory = [_memory(told, names) for told in list(history.for_memory)]
    return sorted((*for_latency, *for_memory), key=lambda told: told.wall_ns, reverse=True)[:MOST]


def _latency(who: Who, one: Interval) -> Told:
    return Told(one.since_ns, who.name, _what(one), _why(one), one.acted)


def _what(one: Interval) -> str:
    seconds = (one.until_ns - one.since_ns) / 1e9
    paused = f"stopped {percent(min(1.0, one.paused_seconds / seconds))}" if seconds > 0 and one.pauses else ""
    queued = f"queue up to {milliseconds(one.queued_low_ns, one.queued_high_ns)}"
    allowed = (f"share {percent(one.share_low, one.share_high)}", queued) if one.whom else ()
    parts = (*allowed, paused, ", ".join(one.means), "" if one.acted else "only watched")
    return f"{', '.join(filter(None, parts))}, for {duration(seconds)}"


def _why(one: Interval) -> str:
    reasons = sorted(one.reasons.values(), key=lambda why: -why.seconds)
    whom = ", ".join(whom.name for whom in one.whom.values() if whom.name)
    return "; ".join(why.text for why in reasons) + (f" (for {whom})" if whom else "")


def _memory(told: MemoryDecision, names: dict[str, str]) -> Told:
    what = f"{told.act} ×{told.count}" if told.count > 1 else told.act
    return Told(told.wall_ns, names.get(told.container, told.container), what, told.reason, told.acted)
