# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container's history in words: a title, and a block for each interval; the latest decisions in a line each. Pure.

The reader decides on width and colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from agent.core.text import quantile
from agent.exporters.status_page.content import DecisionRow
from enforce.audit.history import DecisionHistory
from enforce.audit.model import (
    ContainerHistory,
    ContainerInfo,
    DecisionEffect,
    OfflineInterval,
    OnlineInterval,
    Ruler,
    SlowedContainer,
    shown,
    title,
)
from enforce.memory.accounts import MemoryDecision

_WHOLE_SHARE = 0.9995
_HARMLESS = {"gate", "pace"}  # as long as they stop no process; every other rung has an effect whenever it is in force
_HARDLY = 0.0005  # of the time: less than this is written as 0 %


@dataclass(frozen=True, slots=True)
class Block:
    """A line, and its details: label and text each."""

    head: str
    rows: tuple[tuple[str, str], ...] = ()


def heading(story: ContainerHistory, since_wall_ns: int, zone: tzinfo | None) -> list[str]:
    """The container, and a summary in one or two sentences."""
    container = story.who
    rule = f", rule {shown(container.rule)}" if container.rule else ""
    first = f"{shown(title(container))} ({container.role or 'role unknown'}{rule})"
    summary = _offline_sum(story.intervals) if container.role == "offline" else _online_sum(story.kept)
    if container.role == "periodic":
        summary = shown(container.reason)
    elif container.role not in ("online", "offline"):
        summary = f"it is never slowed: {shown(container.reason) or 'no rule names it'}"
    return [first, f"since {clock(since_wall_ns, zone)}: {summary}"]


def blocks(story: ContainerHistory, zone: tzinfo | None) -> list[Block]:
    """One for each interval, the oldest first, and the containers that were slowed for it."""
    made = [_interval(one, zone) for one in story.intervals] + [_kept(one, zone) for one in story.kept]
    if story.kept:
        rows = tuple((shown(one.name), _slowed(one)) for one in sorted(story.slowed, key=lambda one: -one.seconds))
        made.append(Block("slowed for it", rows) if rows else Block("no container was slowed for it"))
    return made


def clock(wall_ns: int, zone: tzinfo | None) -> str:
    """14:02:11, in the zone; the machine's own without one."""
    return datetime.fromtimestamp(wall_ns / 1e9, zone).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 7 min, 1 h 5 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def milliseconds_range(*values_ns: float | None) -> str:
    """One figure, or a range where they differ: 31–58 ms; "unknown" without any."""
    known = [f"{value / 1e6:.3g}" if value < 1e9 else f"{value / 1e6:.0f}" for value in values_ns if value is not None]
    if not known:
        return "unknown"
    return f"{known[0]} ms" if len(set(known)) == 1 else f"{known[0]}–{known[-1]} ms"


def percent_range(*ratios: float | None) -> str:
    """One figure, or a range: 35–100 %."""
    known = [f"{ratio * 100:.0f}" for ratio in ratios if ratio is not None]
    if not known:
        return "unknown"
    return f"{known[0]} %" if len(set(known)) == 1 else f"{known[0]}–{known[-1]} %"


def was_slowed(one: OfflineInterval) -> bool:
    """Whether the container was really slowed in it."""
    stopped = one.paused_seconds > 0 or one.pauses > 0 or bool(set(one.means) - _HARMLESS)
    return one.acted and (stopped or one.share_low < _WHOLE_SHARE)


def _offline_sum(intervals: Sequence[OfflineInterval]) -> str:
    held = [one for one in intervals if one.acted]
    if not intervals:
        return "nothing was held back: no online container was on its GPUs"
    if not held:
        return f"only watched for {duration(_length(intervals))}: the policy has `enforce: false`"
    paused, pauses = sum(one.paused_seconds for one in held), sum(one.pauses for one in held)
    if not any(was_slowed(one) for one in held):
        return f"under a rule for {duration(_length(held))}, but never slowed"
    share = percent_range(min(one.share_low for one in held))
    return (
        f"held back for {duration(_length(held))}; stopped {pauses} times, "
        f"{_ratio(paused, _length(held))} of that time; its share was {share} at the least"
    )


def _online_sum(kept: Sequence[OnlineInterval]) -> str:
    if not kept:
        return "nothing is known about its SLO"
    sums = [
        (sum(one.kept_seconds for one in kept), "kept"),
        (sum(one.missed_seconds for one in kept), "missed"),
        (sum(one.unknown_seconds for one in kept), "not to be judged (too few requests)"),
    ]
    return "its SLO was " + ", ".join(f"{what} for {duration(seconds)}" for seconds, what in sums if seconds > 0)


def _interval(one: OfflineInterval, zone: tzinfo | None) -> Block:
    length = _length([one])
    paused = f"stopped {_ratio(one.paused_seconds, length)}" if one.acted else "only watched"
    queued = milliseconds_range(one.queued_low_ns, one.queued_high_ns)
    allowed = f"share {percent_range(one.share_low, one.share_high)}, queue up to {queued}, " if one.whom else ""
    head = f"{_span(one, zone)}  {allowed}{paused}"
    means = ", ".join(one.means) or "nothing"
    rows = [("for", _for(ruler)) for ruler in sorted(one.whom.values(), key=lambda ruler: -ruler.seconds)]
    rows.append(("by", f"{means}; rule {shown(one.rule)}, law {shown(one.law)}"))
    reasons = sorted(one.reasons.values(), key=lambda why: -why.seconds)
    rows.append(("why", "; ".join(f"{shown(why.text)} ({duration(why.seconds)})" for why in reasons)))
    if one.brought is not None:
        quantiles = {ruler.quantile for ruler in one.whom.values()}
        rows.append(("then", _then(one.brought, quantile(quantiles.pop()) if len(quantiles) == 1 else "latency")))
    rows += [("but", f"{rung}: {shown(why)}") for rung, why in one.troubles.items()]
    return Block(head, tuple(rows))


def _for(ruler: Ruler) -> str:
    promise = f"{shown(ruler.name) or 'an online container'} on {shown(ruler.device)}: "
    promise += f"{quantile(ruler.quantile)} within {milliseconds_range(ruler.target_ns)}"
    if ruler.latency_ns is None:
        return f"{promise}; too few requests to say how it fared"
    missed = f", over it for {duration(ruler.missed_seconds)}" if ruler.missed_seconds > 0 else ""
    return f"{promise}; it was up to {milliseconds_range(ruler.latency_ns)}{missed}"


def _then(brought: DecisionEffect, what: str) -> str:
    after = f"{duration(brought.window_ns / 1e9)} after the last step"
    if brought.latency_ns is None:
        return f"{after} there were too few requests to say"
    before = "" if brought.latency_before_ns is None else f"{milliseconds_range(brought.latency_before_ns)} → "
    slack = "" if brought.slack_before_ratio is None else f"{percent_range(brought.slack_before_ratio)} → "
    latency, left = milliseconds_range(brought.latency_ns), percent_range(brought.slack_ratio)
    return f"{after}: {what} {before}{latency}, slack {slack}{left}"


def _kept(one: OnlineInterval, zone: tzinfo | None) -> Block:
    parts = []
    for seconds, what in ((one.missed_seconds, "missed"), (one.kept_seconds, "kept")):
        if seconds > 0:
            parts.append(f"{what} for {duration(seconds)}")
    verdict = ", ".join(parts) or "too few requests to judge"
    signal = f" by {shown(one.signal)}" if one.signal else ""
    latency = milliseconds_range(one.latency_low_ns, one.latency_high_ns)
    rows = [("was", f"{quantile(one.quantile)} {latency}, promised {milliseconds_range(one.target_ns)}{signal}")]
    if (also := one.also) is not None:
        latency = milliseconds_range(also.latency_low_ns, also.latency_high_ns)
        rows.append(("and", f"{quantile(also.quantile)} {latency}, promised {milliseconds_range(also.target_ns)}"))
    return Block(f"{_span(one, zone)}  {verdict}", tuple(rows))


def _slowed(one: SlowedContainer) -> str:
    return (
        f"for {duration(one.seconds)}, share {percent_range(one.share_low)} at the least, "
        f"stopped for {duration(one.paused_seconds)}"
    )


def _span(one: OfflineInterval | OnlineInterval, zone: tzinfo | None) -> str:
    return f"{clock(one.since_ns, zone)}–{clock(one.until_ns, zone)} ({duration(_length([one]))})"


def _length(stretches: Iterable[OfflineInterval | OnlineInterval]) -> float:
    return sum((one.until_ns - one.since_ns) / 1e9 for one in stretches)


def _ratio(part: float, whole: float) -> str:
    ratio = min(1.0, part / whole) if whole > 0 else 0.0
    return "<1 %" if _HARDLY < ratio < 0.01 else percent_range(ratio)


MOST = 20
MOST_EACH = 6  # of one container: ten decisions a second are more than can be read


def recent(history: DecisionHistory) -> list[DecisionRow]:
    """Decisions because of latency and of memory, the newest first."""
    names = history.names()
    for_latency = [_latency(container, one) for container, one in history.recent_intervals(MOST_EACH)]
    for_memory = [_memory(decision, names) for decision in list(history.for_memory)]
    return sorted((*for_latency, *for_memory), key=lambda row: row.wall_ns, reverse=True)[:MOST]


def _latency(container: ContainerInfo, one: OfflineInterval) -> DecisionRow:
    return DecisionRow(one.since_ns, container.name, _what(one), _why(one), one.acted)


def _what(one: OfflineInterval) -> str:
    seconds = (one.until_ns - one.since_ns) / 1e9
    paused = f"stopped {percent_range(min(1.0, one.paused_seconds / seconds))}" if seconds > 0 and one.pauses else ""
    queued = f"queue up to {milliseconds_range(one.queued_low_ns, one.queued_high_ns)}"
    allowed = (f"share {percent_range(one.share_low, one.share_high)}", queued) if one.whom else ()
    parts = (*allowed, paused, ", ".join(one.means), "" if one.acted else "only watched")
    return f"{', '.join(filter(None, parts))}, for {duration(seconds)}"


def _why(one: OfflineInterval) -> str:
    reasons = sorted(one.reasons.values(), key=lambda why: -why.seconds)
    rulers = ", ".join(ruler.name for ruler in one.whom.values() if ruler.name)
    return "; ".join(reason.text for reason in reasons) + (f" (for {rulers})" if rulers else "")


def _memory(decision: MemoryDecision, names: dict[str, str]) -> DecisionRow:
    what = f"{decision.act} ×{decision.count}" if decision.count > 1 else decision.act
    name = names.get(decision.container, decision.container)
    return DecisionRow(decision.wall_ns, name, what, decision.reason, decision.acted)
