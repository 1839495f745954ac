# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`pace` and `gate`: the kernel's launch budget and its online-first gate, set per process in the map `rules`.

The kernel stops a process at its own launch, the guardian resumes it; here only the rule is written. An online process
gets a rule too, which never stops it: it says whose launches shut the gate.
"""

from __future__ import annotations

from agent.layout import (
    ORDINALS,
    ROLE_OFFLINE,
    ROLE_ONLINE,
    RULE_BLOCKS,
    RULE_GATE,
    RULE_PACE,
    RULE_SOFT,
    SLOT_NONE,
    ProcessKey,
    Rule,
)
from agent.libbpf import Map
from enforce.model import FULL, Level, Target

_PPM = 1_000_000


class Pace:
    """Owns the map `rules`."""

    name = "pace"

    def __init__(self, rules: Map) -> None:
        self._rules = rules
        self._written: dict[Target, bytes] = {}
        self.foreign_writes = 0

    def current(self, target: Target) -> Level | None:
        """What the kernel goes by now; None: no rule. Another writer's rule is counted, not fought."""
        rule = self._rules.get(ProcessKey.of(target.process))
        if rule is None:
            self._written.pop(target, None)
            return None
        if self._written.get(target) not in (None, bytes(rule)):
            self.foreign_writes += 1
            self._written[target] = bytes(rule)
        return level_of(rule)

    def apply(self, target: Target, level: Level) -> None:
        """Writes the rule, or takes it away. OSError when the kernel's table is full."""
        key = ProcessKey.of(target.process)
        if level == FULL:
            self._rules.delete(key)
            self._written.pop(target, None)
            return
        rule = rule_of(target, level)
        self._rules.put(key, rule)
        self._written[target] = bytes(rule)


def rule_of(target: Target, level: Level) -> Rule:
    """A level as the kernel reads it."""
    rule = Rule(
        role=ROLE_ONLINE if level.online else ROLE_OFFLINE,
        flags=_flags(level),
        rate_ppm=round(level.share_ratio * _PPM),
        max_queued_ns=level.max_queued_ns,
        launch_ns=level.launch_ns,
        max_pause_ns=level.max_pause_ns,
        floor_ppm=round(level.floor_ratio * _PPM),
        slot_unknown=SLOT_NONE if target.slot_unknown is None else target.slot_unknown,
    )
    slots = [SLOT_NONE if slot is None else slot for slot in target.slots[:ORDINALS]]
    rule.slots[:] = slots + [SLOT_NONE] * (ORDINALS - len(slots))
    return rule


def _flags(level: Level) -> int:
    gate = RULE_GATE * level.gate | RULE_SOFT * level.soft
    return gate | RULE_PACE * level.pace | RULE_BLOCKS * level.by_blocks


def level_of(rule: Rule) -> Level:
    """The opposite of `rule_of`."""
    return Level(
        online=rule.role == ROLE_ONLINE,
        gate=bool(rule.flags & RULE_GATE),
        pace=bool(rule.flags & RULE_PACE),
        soft=bool(rule.flags & RULE_SOFT),
        by_blocks=bool(rule.flags & RULE_BLOCKS),
        share_ratio=rule.rate_ppm / _PPM,
        max_queued_ns=rule.max_queued_ns,
        launch_ns=rule.launch_ns,
        max_pause_ns=rule.max_pause_ns,
        floor_ratio=rule.floor_ppm / _PPM,
    )
