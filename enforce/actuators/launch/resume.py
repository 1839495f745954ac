# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When a stopped process may run again, and the SIGCONT that undoes its stop.

The schedule is pure: times in, processes to resume out. A process stopped for its queue waits until enough of it has
drained; one stopped at a gate until no online request has run for `open_delay_ns`, or for longer while requests queue
for each other; and none longer than the rule's longest pause. A process that gets less than its floor that way is let
through a little at a time: much at once would all meet one online request. One stopped at a copy waits until no online
copy is under way on the link, few enough offline ones are, and its container is hardly ahead of the others there
(bpf/pcie.h). A periodic process waits for its turn: when a device's is given back, the request with the earliest
deadline gets it; one that is late already yields to those that can still be in time. `resume` sends SIGCONT to the very
process that the ledger names, if it is stopped and no debugger holds it.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from agent.core.model import ProcessId
from agent.node.pidfd import Pidfd
from agent.node.procfs import Procfs
from agent.probes.abi import (
    ANNOUNCED_NS,
    HASTY_ALWAYS,
    LINK_LEAD_NS,
    LINK_LONGEST_NS,
    LINK_QUEUE_NS,
    PAUSE_COPY,
    PAUSE_GATE,
    PAUSE_TURN,
    RULE_GATE,
    RULE_SHORT,
    RULE_SOFT,
    SLOTS,
    TRUSTED,
    WEIGHT_ONE,
    Gate,
    Link,
    Pause,
    Turn,
)
from enforce.actuators.launch.pace import busy_total_ns, is_busy
from enforce.ledger.entries import LedgerEntry, UndoOutcome

_STOPPED, _TRACED, _FROZEN, _ENDED = "T", "t", "D", "Z"
_PENDING = re.compile(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", re.MULTILINE)
_UNREADABLE = (FileNotFoundError, ProcessLookupError, PermissionError)
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)


def resume(entry: LedgerEntry, procfs: Procfs) -> UndoOutcome:
    """Raises GoneError, SetupError or OSError."""
    if entry.process is None:
        return UndoOutcome.GONE
    with Pidfd(entry.process, procfs) as pidfd:
        tgid = entry.process.tgid
        stopping = _stop_is_pending(tgid, procfs)  # first: what is pending now may have been delivered below
        states = procfs.thread_states(tgid)
        if _TRACED in states:
            return UndoOutcome.TRACED
        if not (_STOPPED in states or stopping or _may_be_frozen(states)):
            return UndoOutcome.RUNNING
        pidfd.send(signal.SIGCONT)
        return UndoOutcome.RESUMED


def _may_be_frozen(states: Collection[str]) -> bool:
    """Whether all live threads show D: by a v1 freezer, and what was stopped before is stopped again once thawed.

    Linux 6.1 and later show D for both. To a process that only waits for a disk SIGCONT does nothing.
    """
    return _FROZEN in states and not set(states) - {_FROZEN, _ENDED}


def _stop_is_pending(tgid: int, procfs: Procfs) -> bool:
    """Whether a SIGSTOP is not delivered yet: the process was about to run, or waits for a disk."""
    threads = f"{procfs.root}/{tgid}/task"
    for tid in procfs.tids(tgid):
        with suppress(*_UNREADABLE), open(f"{threads}/{tid}/status", encoding="utf-8", errors="replace") as file:
            if any(int(mask, 16) & _SIGSTOP_BIT for mask in _PENDING.findall(file.read(1 << 16))):
                return True
    return False


_PPM = 1_000_000
LOW_WATER_RATIO = 0.4  # of max_queued: resuming for each kernel that drained would cost a stop for each; as in bpf/
_FALLBACK_MAX_PAUSE_NS = 200_000_000
_PASS_NS = 500_000  # let through at once, or one launch if that is longer
_GATE_POLL_NS = 5_000_000  # the kernel reports when a gate opens; this finds the ones that open by the hold time
_FLOOR_SPAN_NS = 2_000_000_000  # what a process had beyond its floor counts against it for so long
_DENSE_RATIO, _DENSE_SPAN_NS = 0.8, 50_000_000  # requests that ran for so much of so long queue for each other …
_DENSE_DELAY_NS = 500_000  # … and a gap shorter than this is their service's own work between two of them


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A copy that waits for its link."""

    link: int
    group: int
    weight: int  # × WEIGHT_ONE
    link_ns: int  # its bytes' time
    beside_online: bool


@dataclass(frozen=True, slots=True)
class Deadline:
    """Of a periodic process's request: when it is to have ended, and how long after its begin that is."""

    at_ns: int
    within_ns: int


@dataclass(frozen=True, slots=True)
class Stop:
    """One process that the kernel stopped. Times are CLOCK_MONOTONIC ns."""

    process: ProcessId
    slot: int
    at_ns: int
    queue_due_ns: int  # when its queue has drained enough
    latest_ns: int  # resume then, whatever queue and gate say …
    pass_ns: int  # … and let it launch so much, the launch that was stopped included
    gated: bool
    open_delay_ns: int  # after the gate opened
    busy_ns: int | None = None  # the gate's busy total then: this queue drains only while the gate is open
    copy: HeldCopy | None = None  # that it is stopped at, instead of a launch
    deadline: Deadline | None = None  # it waits for its turn, and for nothing else


@dataclass(frozen=True, slots=True)
class DueResume:
    """A process to resume now. `pass_ns`: GPU time that it may launch beyond the launch that was stopped."""

    stop: Stop
    pass_ns: int


@dataclass(slots=True)
class _FloorCredit:
    """What the floor owes a process: it grows with time and is spent by launches. ns of GPU time; debts are bounded."""

    at_ns: int
    charged_ns: int
    owed_ns: float = 0.0


@dataclass(slots=True)
class _OnlineLoad:
    """How much of the time online requests ran on a device, lately."""

    points: deque[tuple[int, int]] = field(default_factory=deque)  # (time, busy time so far)

    def observe(self, now_ns: int, busy_ns: int) -> None:
        self.points.append((now_ns, busy_ns))
        while len(self.points) > 1 and now_ns - self.points[1][0] >= _DENSE_SPAN_NS:
            self.points.popleft()

    def is_dense(self) -> bool:
        (then_ns, before_ns), (now_ns, busy_ns) = self.points[0], self.points[-1]
        return now_ns - then_ns >= _DENSE_SPAN_NS // 2 and busy_ns - before_ns > _DENSE_RATIO * (now_ns - then_ns)


@dataclass(slots=True)
class _OnlineLoads:
    """The same of all devices. Looked at no more often than it changes notably."""

    observed_ns: int = 0
    by_slot: dict[int, _OnlineLoad] = field(default_factory=dict)

    def observe(self, gates: Sequence[Gate], hold_ns: int, now_ns: int) -> None:
        if now_ns - self.observed_ns < _DENSE_SPAN_NS // 10:
            return
        self.observed_ns = now_ns
        for slot, gate in enumerate(gates):
            if gate.last_online_ns:
                load = self.by_slot.setdefault(slot, _OnlineLoad())
                load.observe(now_ns, busy_total_ns(gate, hold_ns, now_ns))

    def is_dense(self, slot: int) -> bool:
        load = self.by_slot.get(slot)
        return load is not None and load.is_dense()


@dataclass(slots=True)
class ResumeSchedule:
    """The stopped processes, and the gates that some of them wait for (live, shared with the kernel)."""

    gates: Sequence[Gate]
    hold_ns: int
    open_delay_ns: int
    links: Sequence[Link] = ()
    stops: dict[ProcessId, Stop] = field(default_factory=dict)
    turns: Sequence[Turn] = ()  # one for each slot, shared with the kernel
    _queued_slots: set[int] = field(default_factory=set)  # with processes that waited for a turn, the last time
    _free_since: dict[int, int] = field(default_factory=dict)
    _waiting: Counter[int] = field(default_factory=Counter)  # by gate, as the kernel knows it
    _waited_links: set[int] = field(default_factory=set)  # which it knows that a copy waits for
    _loads: _OnlineLoads = field(default_factory=_OnlineLoads)
    _credits: dict[ProcessId, _FloorCredit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for shared in (*self.gates, *self.links):  # an earlier guardian's; what waits now is in `stops`
            shared.waiting = 0

    def add(self, pause: Pause) -> None:
        """The kernel stopped a process."""
        process = pause.process.id()
        longest = pause.rule.max_pause_ns or _FALLBACK_MAX_PAUSE_NS
        if pause.reason == PAUSE_COPY and pause.link < len(self.links):
            self.stops[process] = _stop_at_copy(pause, longest)
            return
        portion = max(_PASS_NS, pause.estimate_ns)
        soft = bool(pause.rule.flags & RULE_SOFT)
        starved_ns = pause.at_ns + self._starved_in_ns(process, pause, longest, portion)
        latest = min(pause.at_ns + longest, starved_ns)
        self.stops[process] = Stop(
            process=process,
            slot=pause.slot,
            at_ns=pause.at_ns,
            queue_due_ns=min(latest, pause.at_ns + drain_ns(pause)),
            latest_ns=latest,
            pass_ns=portion - pause.estimate_ns if pause.rule.floor_ppm else 0,
            gated=pause.reason == PAUSE_GATE or bool(pause.rule.flags & RULE_GATE),
            open_delay_ns=self.open_delay_ns if pause.reason == PAUSE_GATE or not soft else 0,
            busy_ns=self._busy_ns(pause.slot, pause.at_ns) if soft else None,
            deadline=Deadline(pause.due_ns, pause.rule.deadline_ns) if pause.reason == PAUSE_TURN else None,
        )

    def due(self, now_ns: int) -> list[DueResume]:
        """The processes to resume now. They are taken out."""
        self._watch_gates(now_ns)
        ready = []
        for stop in list(self.stops.values()):
            if now_ns >= stop.latest_ns:
                ready.append(DueResume(stop, stop.pass_ns))
            elif stop.deadline is None and now_ns >= self._due_ns(stop, now_ns):
                ready.append(DueResume(stop, 0))
            else:
                continue
            if stop.copy is not None:
                let_through(self.links[stop.copy.link], stop.copy, now_ns)
        for due in ready:
            del self.stops[due.stop.process]
        ready += [DueResume(stop, 0) for stop in self._give_turns(now_ns)]
        self._count_waiting()
        self._watch_links()
        return ready

    def next_ns(self, now_ns: int) -> int | None:
        """When `due` may next return a process; None while none is stopped."""
        if not self.stops:
            return None
        return min(self._due_ns(stop, now_ns) for stop in self.stops.values())

    def is_busy(self, slot: int, now_ns: int) -> bool:
        """Whether an online request runs on the device."""
        return slot < SLOTS and is_busy(self.gates[slot], self.hold_ns, now_ns)

    def put_back(self, due: DueResume, again_ns: int) -> None:
        """The process could not be resumed: due again at `again_ns`, whatever it waited for."""
        stop = replace(due.stop, queue_due_ns=again_ns, latest_ns=again_ns, pass_ns=due.pass_ns)
        self.stops[stop.process] = stop

    def forget(self, process: ProcessId) -> None:
        """The process has ended."""
        self.stops.pop(process, None)
        self._credits.pop(process, None)

    def end_turn(self, process: ProcessId) -> None:
        """The process has ended, and may have got a turn since."""
        for turn in self.turns:
            if turn.owner == _owner(process):
                turn.owner = 0

    def _give_turns(self, now_ns: int) -> list[Stop]:
        """Those that run now: of each device whose turn is free the first one. They are taken out."""
        waiting: dict[int, list[tuple[Deadline, Stop]]] = {}
        for stop in self.stops.values():
            if stop.deadline is not None:
                waiting.setdefault(stop.slot, []).append((stop.deadline, stop))
        given = []
        looked_at, self._queued_slots = waiting.keys() | self._queued_slots, set(waiting)
        for slot in looked_at:
            turn, queue = self.turns[slot], waiting.get(slot, [])
            if turn.waiting != len(queue):  # before the turn is looked at: who gives it back looks here after that
                turn.waiting = len(queue)
            if not queue or _is_taken(turn, now_ns):
                continue
            deadline, stop = min(queue, key=lambda one: (one[0].at_ns < now_ns, one[0].at_ns))
            turn.since_ns, turn.until_ns = now_ns, now_ns + deadline.within_ns
            turn.owner = _owner(stop.process)
            turn.waiting = len(queue) - 1
            given.append(self.stops.pop(stop.process))
        return given

    def _starved_in_ns(self, process: ProcessId, pause: Pause, longest_ns: int, portion_ns: int) -> int:
        """How long until the floor owes it another portion. Debts are bounded by what a longest pause is worth."""
        floor = pause.rule.floor_ppm / _PPM
        bound, most_spent = longest_ns * floor, max(longest_ns, _FLOOR_SPAN_NS) * floor
        credit = self._credits.setdefault(process, _FloorCredit(pause.at_ns, pause.charged_ns, -bound))
        elapsed, spent = max(0, pause.at_ns - credit.at_ns), max(0, pause.charged_ns - credit.charged_ns)
        credit.at_ns, credit.charged_ns = pause.at_ns, pause.charged_ns
        credit.owed_ns = min(bound, max(-most_spent, credit.owed_ns + elapsed * floor - spent))
        return int(max(0.0, portion_ns - credit.owed_ns) / floor) if floor > 0 else longest_ns

    def _due_ns(self, stop: Stop, now_ns: int) -> int:
        if stop.copy is not None:
            return min(stop.latest_ns, now_ns + link_wait_ns(self.links[stop.copy.link], stop.copy, now_ns))
        if stop.deadline is not None:
            turn = self.turns[stop.slot]
            return min(stop.latest_ns, turn.until_ns if _is_taken(turn, now_ns) else now_ns)
        if not stop.gated or stop.slot >= SLOTS:  # an unknown device has no gate
            return stop.queue_due_ns
        opens = self._opens_ns(stop, now_ns)
        queue_due_ns = stop.queue_due_ns
        if stop.busy_ns is not None:  # or each gap between two requests would let another launch through
            queue_due_ns += max(0, self._busy_ns(stop.slot, now_ns) - stop.busy_ns)
        return min(stop.latest_ns, max(queue_due_ns, opens))

    def _opens_ns(self, stop: Stop, now_ns: int) -> int:
        """When the gate is, or may be, open.

        While requests queue for each other one that follows at once is the rule, and is waited for; but not where it
        would be known, unless clients ask again as soon as they are answered.
        """
        free_since, gate = self._free_since.get(stop.slot), self.gates[stop.slot]
        if free_since is None:
            return now_ns + _GATE_POLL_NS
        is_dense, knows = self._loads.is_dense(stop.slot), gate.trust >= TRUSTED
        if knows and gate.served > 0:  # as long as the kernel stops launches for it
            free_since = max(free_since, max(free_since, int(gate.served_ns)) + ANNOUNCED_NS - stop.open_delay_ns)
        if not is_dense:
            return free_since + stop.open_delay_ns
        if knows and gate.served <= 0 and gate.hasty < HASTY_ALWAYS // 2:
            return free_since
        return free_since + max(stop.open_delay_ns, _DENSE_DELAY_NS)

    def _busy_ns(self, slot: int, now_ns: int) -> int:
        return busy_total_ns(self.gates[slot], self.hold_ns, now_ns) if slot < SLOTS else 0

    def _watch_links(self) -> None:
        waiting = Counter(stop.copy.link for stop in self.stops.values() if stop.copy is not None)
        for link in waiting.keys() | self._waited_links:
            self.links[link].waiting = waiting[link]
        self._waited_links = set(waiting)

    def _count_waiting(self) -> Counter[int]:
        """How many wait at each gate, which the kernel has to know: else it wakes no guardian. This is the hot path."""
        waiting = Counter(stop.slot for stop in self.stops.values() if stop.gated and stop.slot < SLOTS)
        if waiting != self._waiting:
            for slot in waiting.keys() | self._waiting.keys():
                self.gates[slot].waiting = waiting[slot]
            self._waiting = waiting
        return waiting

    def _watch_gates(self, now_ns: int) -> None:
        waiting = self._count_waiting()
        self._loads.observe(self.gates, self.hold_ns, now_ns)
        for slot in self._free_since.keys() - waiting.keys():
            del self._free_since[slot]
        for slot in waiting:
            gate = self.gates[slot]
            if self.is_busy(slot, now_ns):
                self._free_since.pop(slot, None)
            elif gate.open <= 0:
                self._free_since[slot] = gate.last_free_ns
            else:  # a request that timed out: free since we noticed
                self._free_since.setdefault(slot, now_ns)


def _owner(process: ProcessId) -> int:
    """As in bpf/turn.h."""
    return process.start_ticks << 32 | process.tgid


def _is_taken(turn: Turn, now_ns: int) -> bool:
    return bool(turn.owner and now_ns < turn.until_ns)


def drain_ns(pause: Pause) -> int:
    """How long until the stopped launch fits: the queue falls to the low-water mark, or to what leaves room for it."""
    room = max(0, pause.rule.max_queued_ns - pause.estimate_ns)
    target = min(room, int(pause.rule.max_queued_ns * LOW_WATER_RATIO))
    surplus = max(0, pause.queued_ns - target)
    return int(surplus * _PPM // max(1, pause.rule.rate_ppm))


_LINK_LOOK_NS = 1_000_000  # what it waits for may end earlier than expected: others may stop copying


def _stop_at_copy(pause: Pause, longest_ns: int) -> Stop:
    rule = pause.rule
    copy = HeldCopy(pause.link, rule.group, rule.weight, pause.estimate_ns, bool(rule.flags & RULE_SHORT))
    latest = pause.at_ns + longest_ns
    return Stop(pause.process.id(), pause.slot, pause.at_ns, latest, latest, 0, gated=False, open_delay_ns=0, copy=copy)


def link_wait_ns(link: Link, copy: HeldCopy, now_ns: int) -> int:
    """How long the copy has to wait at least before another look; 0: it may go through now.

    As in bpf/pcie.bpf.c, but to the low-water marks: a stop for each copy would cost more than it shares.
    """
    waits = [link.online_until_ns - now_ns]
    if copy.beside_online:
        waits.append(link.queued_until_ns - now_ns - int(LINK_QUEUE_NS * LOW_WATER_RATIO))
    waits.append(_lead_ns(link, copy, now_ns))
    return int(min(max(0, *waits), _LINK_LOOK_NS))


def _lead_ns(link: Link, copy: HeldCopy, now_ns: int) -> int:
    """How long the container that has had least needs, with the link for itself, until this one is hardly ahead."""
    own = next((one for one in link.copiers if one.group == copy.group), None)
    others = [one for one in link.copiers if one.group not in (0, copy.group) and one.until_ns > now_ns]
    if own is None or not others:
        return 0
    least = min(others, key=lambda one: int(one.virtual_ns))
    own_ns = own.virtual_ns - copy.link_ns * WEIGHT_ONE // max(1, copy.weight)  # without the copy that waits
    ahead_ns = own_ns - least.virtual_ns - int(LINK_LEAD_NS * LOW_WATER_RATIO) * WEIGHT_ONE // max(1, copy.weight)
    return int(ahead_ns * least.weight // WEIGHT_ONE)


def let_through(link: Link, copy: HeldCopy, now_ns: int) -> None:
    """The copy begins now. The kernel writes the same words: of two that do so at once, one counts for nothing."""
    under_way_ns = min(max(int(link.queued_until_ns), now_ns), now_ns + LINK_LONGEST_NS)
    link.queued_until_ns = until_ns = under_way_ns + copy.link_ns
    for one in link.copiers:
        if one.group == copy.group:
            one.until_ns = until_ns + copy.link_ns
