# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`headroom`: spend the SLO's slack on offline work, and no more.

What an online request waits for is what offline work has queued on the device when it arrives. So the first lever
is the bound of that queue, `max_queued`, and it follows the slack; the second, for when the shortest queue is too long,
is the share of time. Both move down at once and up slowly (senpai), not at all within the dead band (Heracles: no
growth below 10 % slack), and after a step down the law waits until it has readings from after the step.

The bound is kept per device by the pace actuator from delivery-rate estimates, as BBR keeps a path's queue short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from enforce.model import Reading, Share
from enforce.policy.model import OfflineRule, Slo, Tuning

DEFAULT_MAX_QUEUED_NS = 2_000_000
MIN_QUEUED_NS = 500_000  # below this a stop costs more than it saves: a stop and resume take about 0.15 ms
TOP_QUEUED_NS = 20_000_000
GROW_SLACK = 0.10  # less than this: no growth
SHRINK_SLACK = 0.0  # less than this, if only by what noise explains: a little down
HOLD_NS = 1_000_000_000  # after a step down: as long as the reading's recent part
GROW_EVERY_NS = 500_000_000
QUEUE_GROWTH, QUEUE_TRIM, QUEUE_CUT = 1.10, 0.9, 0.5
SHARE_GROWTH, SHARE_CUT = 0.05, 0.7
MISSES_BEFORE_CUT = 3


@dataclass(frozen=True, slots=True)
class State:
    """Where the two levers stand, and when each may move again."""

    ratio: float
    max_queued_ns: float
    hold_until_ns: int = 0
    grow_after_ns: int = 0
    last_reading_ns: int | None = None
    misses: int = 0  # in a row, with the shortest queue


@dataclass(frozen=True, slots=True)
class Headroom:
    """The law with one rule's limits."""

    floor_ratio: float
    top_queued_ns: float
    no_data_hold_ns: int
    name: ClassVar[str] = "headroom"

    @classmethod
    def of(cls, rule: OfflineRule, tuning: Tuning) -> Headroom:
        """With the rule's floor and upper bound of the queue."""
        return cls(rule.limits.floor_ratio, rule.limits.max_queued_ns or TOP_QUEUED_NS, tuning.no_data_hold_ns)

    def start(self) -> State:
        """Everything allowed, with a short queue: protection before the first reading."""
        return State(1.0, min(DEFAULT_MAX_QUEUED_NS, self.top_queued_ns))

    def step(self, state: State, reading: Reading | None, slo: Slo, now_ns: int) -> tuple[State, Share]:
        """One decision."""
        if reading is None:
            return self._without_data(state, now_ns)
        state = replace(state, last_reading_ns=now_ns)
        if now_ns < state.hold_until_ns:
            return self._answer(state, "holding after a step down")
        # The long window remembers what is already mended: only what is recent may cause another step down.
        recent = reading.recent_ns if reading.recent_ns is not None else reading.latency_ns
        low = reading.recent_low_ns if reading.recent_low_ns is not None else reading.latency_ns
        if recent is None or low is None:
            return self._answer(state, "too few requests to judge")
        if low > slo.target_ns:
            return self._step_down(state, now_ns, _slack(recent, slo))
        state = replace(state, misses=0)
        if _slack(recent, slo) < SHRINK_SLACK:
            return self._trim(state, now_ns, _slack(recent, slo))
        worst = _slack(max(recent, reading.latency_ns or 0.0), slo)
        if worst < GROW_SLACK:
            return self._answer(state, f"slack {worst:.0%}: within the dead band")
        return self._grow(state, now_ns, worst)

    def _without_data(self, state: State, now_ns: int) -> tuple[State, Share]:
        """Hold, then release: an online side that says nothing has nothing to protect, but may come back."""
        if state.last_reading_ns is not None and now_ns - state.last_reading_ns < self.no_data_hold_ns:
            return self._answer(state, "no reading: holding")
        start = self.start()
        return start, Share(start.ratio, int(start.max_queued_ns), "no online requests: released")

    def _step_down(self, state: State, now_ns: int, slack: float) -> tuple[State, Share]:
        held = replace(state, hold_until_ns=now_ns + HOLD_NS, grow_after_ns=now_ns + 2 * HOLD_NS)
        missed = f"target missed by {-slack:.0%}"
        if state.max_queued_ns > MIN_QUEUED_NS:
            queued = max(MIN_QUEUED_NS, state.max_queued_ns * QUEUE_CUT)
            return self._answer(replace(held, max_queued_ns=queued, misses=0), f"{missed}: shorter queue")
        if state.misses + 1 < MISSES_BEFORE_CUT:  # a second of noise is no reason: the queue is as short as can be
            return self._answer(replace(held, misses=state.misses + 1), f"{missed}: watching")
        ratio = max(self.floor_ratio, state.ratio * SHARE_CUT)
        return self._answer(replace(held, ratio=ratio, misses=0), f"{missed}: smaller share")

    def _trim(self, state: State, now_ns: int, slack: float) -> tuple[State, Share]:
        queued = max(MIN_QUEUED_NS, state.max_queued_ns * QUEUE_TRIM)
        trimmed = replace(state, max_queued_ns=queued, hold_until_ns=now_ns + HOLD_NS // 4)
        return self._answer(trimmed, f"slack {slack:.1%}: a shorter queue")

    def _grow(self, state: State, now_ns: int, slack: float) -> tuple[State, Share]:
        if now_ns < state.grow_after_ns:
            return self._answer(state, f"slack {slack:.0%}: waiting to grow")
        later = replace(state, grow_after_ns=now_ns + GROW_EVERY_NS)
        if state.ratio < 1.0:
            ratio = min(1.0, state.ratio + SHARE_GROWTH)
            return self._answer(replace(later, ratio=ratio), f"slack {slack:.0%}: larger share")
        queued = min(self.top_queued_ns, state.max_queued_ns * QUEUE_GROWTH)
        return self._answer(replace(later, max_queued_ns=queued), f"slack {slack:.0%}: longer queue")

    def _answer(self, state: State, reason: str) -> tuple[State, Share]:
        return state, Share(state.ratio, int(state.max_queued_ns), reason)


def _slack(latency_ns: float, slo: Slo) -> float:
    return (slo.target_ns - latency_ns) / slo.target_ns
