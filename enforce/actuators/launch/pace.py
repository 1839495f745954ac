# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`pace` and `gate`: the kernel's launch budget and its online-first gate, set per process in the map `rules`; and how
copies are paced.

The kernel stops a process at its own launch and the guardian resumes it; here only the rule is written. An online
process gets a rule too, which never stops it: it says whose launches shut the gate.

`GateReader` reads the kernel's gates: how busy a device's online side is, and how much it launches. When a request
counts as running is defined in bpf/pace.bpf.c.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from agent.core.clock import NS_PER_SECOND
from agent.core.model import Device, DeviceReading, DeviceUuid, OnlineUse, ProcessId
from agent.probes.abi import (
    LINK_DIRECTIONS,
    ORDINALS,
    ROLE_OFFLINE,
    ROLE_ONLINE,
    ROLE_PERIODIC,
    RULE_BLOCKS,
    RULE_COPIES,
    RULE_GATE,
    RULE_PACE,
    RULE_SHORT,
    RULE_SOFT,
    SLOT_NONE,
    SLOTS,
    Control,
    Copier,
    Gate,
    Link,
    ProcessKey,
    Rule,
)
from agent.probes.libbpf import Map
from enforce.model import FULL, CopyLevel, Level, Target
from enforce.policy.model import Pcie

_PPM = 1_000_000


class PaceRules:
    """Owns the map `rules`. `control` is shared with the kernel, whose threads keep their rules until it changes.

    `payers`: by which the kernel finds the rule of a process that was forked under one, and has none of its own.
    """

    name = "pace"

    def __init__(self, rules: Map, payers: Map, control: Control) -> None:
        self._rules, self._payers, self._control = rules, payers, control
        control.rules += 1
        self._seen: dict[Target, tuple[bytes, Level]] = {}
        self.foreign_writes = 0

    def current(self, targets: Collection[Target]) -> dict[Target, Level]:
        """The rules in force now. Another writer's rule is counted, not fought."""
        keys = {target: ProcessKey.of(target.process) for target in targets}
        rules, found = self._rules.get_all(keys.values()), {}
        for target, key in keys.items():
            rule = rules.get(bytes(key))
            if rule is None:
                self._seen.pop(target, None)
                continue
            seen, now = self._seen.get(target), bytes(rule)
            if seen is None or seen[0] != now:
                self.foreign_writes += seen is not None
                seen = self._seen[target] = now, level_of(rule)
            found[target] = seen[1]
        return found

    def apply(self, target: Target, level: Level) -> None:
        """Writes the rule, or removes it. OSError when the kernel's table is full."""
        key = ProcessKey.of(target.process)
        if level == FULL:
            self._rules.delete(key)
            self._seen.pop(target, None)
        else:
            rule = rule_of(target, level)
            self._rules.put(key, rule)
            self._seen[target] = bytes(rule), level_of(rule)
        self._control.rules += 1

    def disown(self, process: ProcessId) -> None:
        """See Actuator."""
        self._payers.delete(ProcessKey.of(process))


def rule_of(target: Target, level: Level) -> Rule:
    """A level as the kernel reads it."""
    rule = Rule(
        role=ROLE_PERIODIC if level.deadline_ns else ROLE_ONLINE if level.online else ROLE_OFFLINE,
        flags=_flags(level),
        rate_ppm=round(level.share_ratio * _PPM),
        max_queued_ns=level.max_queued_ns,
        launch_ns=level.launch_ns,
        max_pause_ns=level.max_pause_ns,
        floor_ppm=round(level.floor_ratio * _PPM),
        deadline_ns=level.deadline_ns,
        slot_unknown=SLOT_NONE if target.slot_unknown is None else target.slot_unknown,
    )
    if level.copies is not None:
        rule.group, rule.weight = level.copies.group, level.copies.weight_thousandths
    slots = [SLOT_NONE if slot is None else slot for slot in target.slots[:ORDINALS]]
    rule.slots[:] = slots + [SLOT_NONE] * (ORDINALS - len(slots))
    return rule


def _flags(level: Level) -> int:
    gate = RULE_GATE * level.gate | RULE_SOFT * level.soft
    copies = 0 if level.copies is None else RULE_COPIES | RULE_SHORT * level.copies.beside_online
    return gate | RULE_PACE * level.pace | RULE_BLOCKS * level.by_blocks | copies


def level_of(rule: Rule) -> Level:
    """The inverse of `rule_of`."""
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
        copies=_copies_of(rule),
        deadline_ns=rule.deadline_ns,
    )


def _copies_of(rule: Rule) -> CopyLevel | None:
    if not rule.flags & RULE_COPIES:
        return None
    return CopyLevel(rule.group, rule.weight, bool(rule.flags & RULE_SHORT))


# Of what a link can carry copies get 0.78 to 0.87, beside headers and flow control. Believed to be faster than it is,
# more and more offline copies would be under way.
PAYLOAD_RATIO = 0.75


class Links:
    """Says how fast the links are. `links` is shared with the kernel, which stops nothing where it is unknown."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        for link in links:  # by an earlier policy: the containers' numbers begin anew
            link.copiers[:] = [Copier()] * len(link.copiers)

    def set_speeds(self, pcie: Pcie, devices: Iterable[DeviceReading], slots: Mapping[DeviceUuid, int]) -> None:
        """For each decision: devices and their slots come and go."""
        speeds = {slots[one.device.uuid]: link_speed(pcie, one.device) for one in devices if one.device.uuid in slots}
        for index, link in enumerate(self._links):
            speed = speeds.get(index // LINK_DIRECTIONS) or 0
            if link.bytes_per_second != speed:
                link.bytes_per_second = speed


def link_speed(pcie: Pcie, device: Device) -> int | None:
    """Bytes per second of copies in one direction: as the policy says, else by NVML; None: unknown."""
    if pcie.bytes_per_second is not None:
        return pcie.bytes_per_second
    whole = device.pcie_bytes_per_second
    return None if whole is None else round(whole * PAYLOAD_RATIO)


LONGEST_WAIT_HOLDS = 100  # as in bpf/pace.bpf.c
_WINDOW_NS = 10 * NS_PER_SECOND
_SPAN_NS = NS_PER_SECOND // 4  # a burst is as long as that, or longer


def busy_end_ns(gate: Gate, hold_ns: int) -> int:
    """When the running online requests count as over, unless there are more launches or waits until then."""
    return int(gate.last_online_ns) + hold_ns * (LONGEST_WAIT_HOLDS if gate.in_wait > 0 else 1)


def is_busy(gate: Gate, hold_ns: int, now_ns: int) -> bool:
    """Whether an online request runs on the device."""
    return bool(gate.open > 0 and now_ns < busy_end_ns(gate, hold_ns))


def busy_total_ns(gate: Gate, hold_ns: int, now_ns: int) -> int:
    """Time so far that online requests ran on the device."""
    since, total = int(gate.busy_since_ns), int(gate.busy_total_ns)
    if gate.open <= 0 or not since:
        return total
    return total + max(0, min(now_ns, busy_end_ns(gate, hold_ns)) - since)


class GateReader:
    """The state of each device's gate. `gates` is shared with the kernel."""

    def __init__(self, gates: Sequence[Gate], hold_ns: int) -> None:
        self._gates, self._hold_ns = gates, hold_ns
        self._points: dict[int, deque[tuple[int, int]]] = {}
        self._online: dict[tuple[DeviceUuid, int], OnlineUse] = {}

    def busy(self, slots: Mapping[DeviceUuid, int], now_ns: int) -> dict[DeviceUuid, float]:
        """Share 0–1 of the time that online requests ran, in the busiest quarter of a second of the last ten seconds.

        What offline work adds to a request is added to all that queue behind it, and those are in bursts. To be called
        once a decision.
        """
        ratios = {device: self._busy(slot, now_ns) for device, slot in slots.items() if slot < SLOTS}
        return {device: ratio for device, ratio in ratios.items() if ratio is not None}

    def requests(self) -> tuple[int, ...]:
        """Online requests so far, by slot, and how many run: equal, none has begun or ended meanwhile."""
        return tuple(int(number) for gate in self._gates for number in (gate.requests, gate.open))

    def online(self, slots: Mapping[DeviceUuid, int], now_ns: int) -> dict[DeviceUuid, OnlineUse]:
        """Of devices that an online request ran on. Never less than before: the kernel may book while it is read."""
        for device, slot in slots.items():
            if slot < SLOTS and (gaps := int(self._gates[slot].requests)):
                seconds = busy_total_ns(self._gates[slot], self._hold_ns, now_ns) / NS_PER_SECOND
                before = self._online.get((device, slot), OnlineUse(0.0, 0))
                self._online[device, slot] = OnlineUse(max(seconds, before.busy_seconds_total), gaps)
        return {device: use for (device, slot), use in self._online.items() if slots.get(device) == slot}

    def blocks(self, slots: Mapping[DeviceUuid, int]) -> dict[DeviceUuid, int]:
        """Blocks of grids that online processes launched, ever."""
        return {device: int(self._gates[slot].online_blocks) for device, slot in slots.items() if slot < SLOTS}

    def _busy(self, slot: int, now_ns: int) -> float | None:
        points = self._points.setdefault(slot, deque())
        points.append((now_ns, busy_total_ns(self._gates[slot], self._hold_ns, now_ns)))
        while len(points) > 2 and points[1][0] <= now_ns - _WINDOW_NS:
            points.popleft()
        return busiest(points)


def busiest(points: Iterable[tuple[int, int]]) -> float | None:
    """Of (time, busy time so far), the oldest first: the greatest share of a span. None: not seen for long enough."""
    most, recent = None, deque[tuple[int, int]]()
    for now_ns, busy_ns in points:
        recent.append((now_ns, busy_ns))
        while len(recent) > 1 and now_ns - recent[1][0] >= _SPAN_NS:
            recent.popleft()
        then_ns, then = recent[0]
        if now_ns - then_ns >= _SPAN_NS:
            most = max(most or 0.0, min(1.0, max(0, busy_ns - then) / (now_ns - then_ns)))
    return most
