# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From shares to levels, and from levels to the changes that have to be written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from enforce.model import FULL, Level, Share, Target
from enforce.policy.model import OfflineRule

FALLBACK_LAUNCH_NS = 100_000  # before a process's first delivery: nothing is known, so a middling kernel
RELEVANT_CHANGE = 0.02  # of an estimate: smaller ones are not worth a write


@dataclass(frozen=True, slots=True)
class Change:
    """One target whose level has to become another one."""

    target: Target
    before: Level
    after: Level


def offline_level(rule: OfflineRule, share: Share, launch_ns: float | None) -> Level:
    """The level of one process under an offline rule."""
    return Level(
        gate="gate" in rule.ladder,
        pace="pace" in rule.ladder,
        share_ratio=max(rule.limits.floor_ratio, min(1.0, share.ratio)),
        max_queued_ns=share.max_queued_ns,
        launch_ns=int(launch_ns) if launch_ns else FALLBACK_LAUNCH_NS,
        max_pause_ns=rule.limits.max_pause_ns,
        floor_ratio=rule.limits.floor_ratio,
    )


def changes(desired: Mapping[Target, Level], current: Mapping[Target, Level]) -> tuple[Change, ...]:
    """What must be written: releases first, so that nobody is held longer than needed."""
    released = [Change(target, level, FULL) for target, level in current.items() if target not in desired]
    moved = [
        Change(target, current.get(target, FULL), level)
        for target, level in desired.items()
        if not _same(current.get(target, FULL), level)
    ]
    return (*released, *moved)


def _same(a: Level, b: Level) -> bool:
    if abs(a.launch_ns - b.launch_ns) > RELEVANT_CHANGE * max(a.launch_ns, b.launch_ns):
        return False
    return (a.online, a.gate, a.pace, a.share_ratio, a.max_queued_ns, a.max_pause_ns, a.floor_ratio) == (
        b.online,
        b.gate,
        b.pace,
        b.share_ratio,
        b.max_queued_ns,
        b.max_pause_ns,
        b.floor_ratio,
    )
