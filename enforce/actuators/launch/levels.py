# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From shares to levels, from levels to the changes to write, and the kernel's slot of each device. Pure.

A device keeps its slot while it is there, lost or not; the slot of a device that left is given to the next one, as MIG
instances come and go under new names. Beyond the last slot a device is not controlled, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent.core.model import DeviceUuid
from agent.probes.abi import SLOTS, WEIGHT_ONE
from enforce.model import FULL, CopyLevel, Level, Share, Target
from enforce.policy.model import OfflineRule

FALLBACK_LAUNCH_NS = 100_000  # before a process's first delivery: a kernel of average length
RELEVANT_CHANGE = 0.02  # of a figure: smaller ones are not worth a write
BLOCKS_WINDOW_NS = 50_000_000  # of a budget in blocks, as TGS has it


@dataclass(frozen=True, slots=True)
class LevelChange:
    """One target whose level has to become another one."""

    target: Target
    before: Level
    after: Level


def offline_level(rule: OfflineRule, share: Share, part: float, inside: float, launch_ns: float | None) -> Level:
    """The level of one process under an offline rule: its part 0–1 of the share, and of its container's floor."""
    if rule.law == "off":
        return FULL
    level = Level(
        gate="gate" in rule.ladder,
        soft=share.soft and "gate" in rule.ladder and "pace" in rule.ladder,
        pace="pace" in rule.ladder,
        share_ratio=max(rule.limits.floor_ratio * inside, min(1.0, share.ratio * part)),
        max_queued_ns=int(share.max_queued_ns * part),
        launch_ns=int(launch_ns) if launch_ns else FALLBACK_LAUNCH_NS,
        max_pause_ns=rule.limits.max_pause_ns,
        floor_ratio=rule.limits.floor_ratio * inside,
    )
    return level if share.blocks is None else _by_blocks(level, share.blocks * part)


def copy_level(rule: OfflineRule, group: int, *, beside_online: bool) -> CopyLevel:
    """How the copies of a container under an offline rule are paced; `group`: its number."""
    return CopyLevel(group, max(1, round(rule.weight * WEIGHT_ONE)), beside_online)


def _by_blocks(level: Level, blocks: float) -> Level:
    """A budget of blocks per window: a queue one window long, that each block adds its part of a window to."""
    charge_ns = int(BLOCKS_WINDOW_NS / max(1.0, blocks))
    return replace(
        level,
        gate=False,
        soft=False,
        by_blocks=True,
        share_ratio=1.0,
        max_queued_ns=BLOCKS_WINDOW_NS,
        launch_ns=charge_ns,
    )


def changes(desired: Mapping[Target, Level], current: Mapping[Target, Level]) -> tuple[LevelChange, ...]:
    """What must be written: releases first, so that no process is held longer than needed."""
    released = [LevelChange(target, level, FULL) for target, level in current.items() if target not in desired]
    moved = [
        LevelChange(target, current.get(target, FULL), level)
        for target, level in desired.items()
        if not _same(current.get(target, FULL), level)
    ]
    return (*released, *moved)


def _same(a: Level, b: Level) -> bool:
    if a == b:
        return True

    def plain(level: Level) -> Level:
        return replace(level, share_ratio=0.0, max_queued_ns=0, launch_ns=0)

    figures = ((a.share_ratio, b.share_ratio), (a.max_queued_ns, b.max_queued_ns), (a.launch_ns, b.launch_ns))
    return plain(a) == plain(b) and all(abs(x - y) <= RELEVANT_CHANGE * max(x, y) for x, y in figures)


def assign(before: Mapping[DeviceUuid, int], present: Sequence[DeviceUuid]) -> dict[DeviceUuid, int]:
    """Device → slot, for as many as there are slots."""
    kept = {device: before[device] for device in present if device in before}
    free = iter(sorted(set(range(SLOTS)) - set(kept.values())))
    return kept | dict(zip((device for device in present if device not in kept), free, strict=False))
